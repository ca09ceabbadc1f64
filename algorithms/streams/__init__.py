"""Which sample arrives at which device, and when."""
