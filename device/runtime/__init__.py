"""One device as a state machine without input and output: events go in, actions come out."""
