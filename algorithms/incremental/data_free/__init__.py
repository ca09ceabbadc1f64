"""Methods that rehearse from samples which the coordinator makes without data, once a task."""
