"""What is minimised, and by which steps, on devices and at the coordinator."""
