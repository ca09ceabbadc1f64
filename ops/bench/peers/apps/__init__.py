"""One program for each simulator. Each runs in its own environment and imports nothing of fedemu."""
