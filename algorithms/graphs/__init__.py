"""CUDA graphs: steps that are recorded once and launched again by a single call."""
