"""What every process needs from its machine: whole files, an end together with its parent, code by name."""
