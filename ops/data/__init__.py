"""Data sets: how they are found, decoded and cached."""
