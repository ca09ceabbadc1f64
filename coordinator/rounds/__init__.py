"""A method's script is driven round by round; its rows are written and its server jobs are run."""
