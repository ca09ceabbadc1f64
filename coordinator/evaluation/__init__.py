"""How good a model is, what it forgot, and what it generates."""
