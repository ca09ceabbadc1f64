"""What a device keeps of periods that are over, and how devices choose it together."""
