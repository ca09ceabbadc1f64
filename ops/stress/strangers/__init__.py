"""Attacks of strangers on a run: what they send, and what becomes of the run meanwhile."""
