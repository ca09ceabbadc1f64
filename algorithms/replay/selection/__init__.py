"""Strategies that choose which samples a device keeps; numpy only."""
