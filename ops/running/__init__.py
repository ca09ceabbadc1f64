"""Starts the processes of a run and sees them to their end: from the new run directory to the last line on stderr."""
