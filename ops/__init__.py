"""What a person touches: configuration, data sets, command line, results, monitoring, stress and benchmarks."""
