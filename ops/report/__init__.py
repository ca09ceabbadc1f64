"""The page of one run: its figures, tables and plots."""
