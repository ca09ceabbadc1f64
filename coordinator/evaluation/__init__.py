"""The evaluation of a model: how good it is, what it forgot, and what it generates."""
