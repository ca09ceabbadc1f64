"""A log file per process in the run directory; the terminal gets sentences instead."""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback
from pathlib import Path

FORMAT = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"


class LogFile(logging.FileHandler):
    """The file that ``open_log`` opened, as against handlers that others have put there."""


def open_log(path: Path, level: str = "info") -> None:
    """Send this process's log records to ``path``, warnings of libraries included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = LogFile(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, LogFile)]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def log_crash(error: BaseException) -> Path:
    """Write the traceback of an internal error where the log is, or else into a new file; returns that file."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogFile):
            logging.getLogger("fedemu").critical("internal error", exc_info=error)
            return Path(handler.baseFilename)
    with tempfile.NamedTemporaryFile(
        "w", prefix="fedemu-crash-", suffix=".log", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
        print(" ".join(sys.argv), file=file)
    return Path(file.name)
