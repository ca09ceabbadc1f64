"""The observers of a run: the display, the logs, the metrics for Prometheus."""
