"""The live page of runs: a process of its own that follows run directories and serves them on the loopback."""
