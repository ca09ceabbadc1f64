"""The behaviour of a device: when it is on-line, how fast it is, and how it fails. Pure functions of the seed."""
