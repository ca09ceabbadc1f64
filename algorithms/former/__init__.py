"""Former import places, which stay valid: ``fedemu.algorithms.losses`` and its like. New code imports elsewhere.

``fedemu.algorithms`` looks for modules here too. Each file hands on names and defines none.
"""
