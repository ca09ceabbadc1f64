"""Data sets: found, decoded once per machine, and mapped by every process. ``corpora.py`` is the door.

``source.py`` says what to read and where a name leads; ``readers.py`` lists the readers and says how to add one;
``split.py`` takes training and test samples apart; ``cache.py`` stores what was decoded. A data set of your own needs
no reader: name a function as ``module:name``, see ``made.own``.
"""
