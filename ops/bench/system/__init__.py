"""The whole system: ``fedemu run digits`` with real processes."""
