"""The wire: messages between two processes."""
