"""Who watches a run: the display, the logs, Prometheus."""
