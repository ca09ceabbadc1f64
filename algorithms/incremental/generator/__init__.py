"""A generator that is trained without data: its losses, its training, its samples."""
