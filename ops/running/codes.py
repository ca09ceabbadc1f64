"""The codes with which commands end. The numbers themselves stand with the errors in ``protocol/errors.py``.

This file imports next to nothing, so a command knows its codes before the imports that take half a second.
"""

from __future__ import annotations

from fedemu.protocol.errors import ConfigurationError, FedemuError, Interrupted

USAGE = ConfigurationError.exit_code
INTERRUPTED = Interrupted.exit_code
INTERNAL_ERROR = FedemuError.exit_code
IN_WORDS = (
    "Exit codes: 0 done; 2 wrong usage or configuration; 3 no quorum, or the other side never came or is gone; "
    "4 interrupted, with a checkpoint; 5 internal error, its traceback in the log."
)
"""The last line of every command's help."""
