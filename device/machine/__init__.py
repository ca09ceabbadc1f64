"""The supervisor of a machine, and everything that it looks after."""
