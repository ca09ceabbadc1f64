"""A log file per process in the run directory; the terminal gets sentences instead."""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback
from pathlib import Path

FORMAT = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"


def open_log(path: Path, level: str = "info") -> None:
    """Send this process's log records to ``path``, warnings of libraries included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", delay=False)
    handler.setFormatter(logging.Formatter(FORMAT))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(level.upper())
    logging.captureWarnings(True)


def log_crash(error: BaseException) -> Path:
    """Write the traceback of an internal error where the log is, or else into a new file; returns that file."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            logging.getLogger("fedemu").critical("internal error", exc_info=error)
            return Path(handler.baseFilename)
    with tempfile.NamedTemporaryFile(
        "w", prefix="fedemu-crash-", suffix=".log", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
        print(" ".join(sys.argv), file=file)
    return Path(file.name)
