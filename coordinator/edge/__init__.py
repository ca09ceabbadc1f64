"""An edge: it serves blobs to the machines behind it, keeps the results of their devices, and sends sums of them."""
