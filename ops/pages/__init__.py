"""How pages and pictures look."""
