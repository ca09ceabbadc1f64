"""Replay: what devices keep of periods that are over, and how they choose it, alone or together."""
