"""The plots of a run's page. Each is a function that returns a figure, or None if it lacks its data."""
