"""Former import places, which stay valid, such as ``fedemu.algorithms.losses``. New code does not use them.

``fedemu.algorithms`` looks for modules here too. Each file hands on names and defines none.
"""
