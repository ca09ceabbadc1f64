"""Named scenarios that try to break a real fleet, and the invariants that must hold nevertheless."""
