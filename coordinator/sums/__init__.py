"""Exact sums of payloads: the same to the last bit in any order, in any groups, on any tree. Numpy only, no torch."""
