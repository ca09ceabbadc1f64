"""The shell around the machines: what each peer is answered."""
