"""The commands of fedemu."""
