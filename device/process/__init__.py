"""A process that holds devices, and the zygote that forks it."""
