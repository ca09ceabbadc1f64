"""What all benchmarks share: measuring in pairs, worker processes, figures of processes, and the plain loop."""
