"""The shell around the machines: it receives every message and answers each peer."""
