"""What every process asks of its machine: whole files, an end together with its parent, code that is found by name."""
