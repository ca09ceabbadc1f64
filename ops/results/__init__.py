"""A run, read back from its directory."""
