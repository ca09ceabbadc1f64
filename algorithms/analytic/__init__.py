"""Learners without gradients: sums of features from the devices, and a classifier that follows from them."""
