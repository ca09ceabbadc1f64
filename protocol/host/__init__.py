"""What every process needs from its machine: to write whole files, to end with its parent, to share memory."""
