"""One ask: its state machine, its exchange with the fleet, its payloads, and their reduction."""
