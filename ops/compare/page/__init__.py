"""Runs side by side, as a page with plots."""
