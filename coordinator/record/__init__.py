"""What a run leaves on disk: how it is written, and how it is read."""
