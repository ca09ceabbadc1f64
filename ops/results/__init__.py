"""The results of a run, read back from its directory."""
