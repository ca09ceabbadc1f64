"""What a GPU does for training: rates by executor and stack, the share of time with kernels, and the roofline."""
