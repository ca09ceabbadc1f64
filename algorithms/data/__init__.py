"""Samples, and which device holds which of them."""
