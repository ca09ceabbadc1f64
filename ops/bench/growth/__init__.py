"""Growth: what a round costs with more devices, with larger models, and with larger cohorts."""
