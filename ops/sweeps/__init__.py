"""Sweeps and suites: lists of experiments, settings, methods and seeds, run several at a time, and compared."""
