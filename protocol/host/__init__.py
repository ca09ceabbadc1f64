"""What every process needs from its machine: to write whole files, to end with its parent, to load code by name."""
