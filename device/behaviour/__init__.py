"""When a device is on-line, how fast it is, and how it fails; pure functions of the seed."""
