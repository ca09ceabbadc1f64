"""Keys: where they are, which machines are approved, and when a coordinator needs them."""
