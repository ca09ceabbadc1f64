"""The memory of a device: its stream, its replay buffer, its own state."""
