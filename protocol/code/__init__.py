"""Code that settings name, such as a user's own method: it is found, loaded from its source, and told in errors."""
