"""Benchmarks. Every figure stands beside its floor, the least that the same work can cost, measured in the same run."""
