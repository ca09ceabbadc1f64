"""Methods for class-incremental streams, whose classes come task by task."""
