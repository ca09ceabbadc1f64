"""The tables of an experiment's file, one module per group."""
