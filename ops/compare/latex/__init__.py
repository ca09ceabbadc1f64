"""Runs side by side, as a table for LaTeX."""
