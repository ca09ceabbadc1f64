"""What an experiment is, and where it comes from."""
