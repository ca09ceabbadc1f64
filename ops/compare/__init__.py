"""Runs side by side, as numbers and as words."""
