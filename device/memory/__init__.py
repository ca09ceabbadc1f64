"""What a device remembers: its stream, its replay buffer, its own state."""
