"""Training: device updates by the trainer, without a fleet."""
