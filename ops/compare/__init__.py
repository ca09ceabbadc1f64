"""The comparison of runs, as numbers and as words."""
