"""One run as a page."""
