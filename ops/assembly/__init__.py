"""Puts an experiment together: data, model, method, partition and stream (``parts.py``), and the plan of a run."""
