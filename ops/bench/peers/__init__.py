"""Other simulators of federated learning: they do the same work in environments of their own."""
