"""The plots of a run's page."""
