"""What notebooks and scripts call, and what they get back. ``fedemu`` hands the calls on."""
