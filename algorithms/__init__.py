"""The science: scripts, programs, losses, models, corpora and partitions, free of input and output."""
