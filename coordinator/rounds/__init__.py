"""The rounds of a run: a script is driven, server jobs are run, rows and checkpoints are written."""
