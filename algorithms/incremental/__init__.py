"""Methods for classes that arrive task by task."""
