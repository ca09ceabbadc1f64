"""The codes with which commands end. The numbers themselves stand with the errors in ``protocol/errors.py``.

This file imports next to nothing, so a command knows its codes before the imports that take half a second.
"""

from __future__ import annotations

from fedemu.protocol.errors import ConfigurationError, FedemuError, Interrupted

USAGE = ConfigurationError.exit_code
INTERRUPTED = Interrupted.exit_code
INTERNAL_ERROR = FedemuError.exit_code
CODES = (
    "\b\nExit codes:\n"
    "  0 done: also a run that diverged, which its summary.json says\n"
    "  1 a scenario of `fedemu stress` failed\n"
    "  2 wrong usage or configuration, missing data, or a machine that can't do it\n"
    "  3 no quorum, or the other side never came, refused, or is gone\n"
    "  4 interrupted; what was checkpointed can be resumed\n"
    "  5 internal error, with its traceback in the log, or a full disk"
)
"""The exit codes, in the help of ``fedemu``."""
IN_WORDS = (
    "Exit codes: 0 done; 1 a scenario of stress failed; 2 wrong usage or configuration; 3 no quorum, or the other side "
    "never came or is gone; 4 interrupted, with a checkpoint; 5 internal error (see the log) or a full disk."
)
"""The exit codes, in the help of every command."""
