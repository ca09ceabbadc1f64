"""An emulated device: its behaviour, memory and protocol; and the supervisor and trainers of a machine."""
