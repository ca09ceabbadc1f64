"""Tapes: what a function of tensors does, recorded once and then done again without the function."""
