"""How programs run: one device after another, or many devices stacked."""
