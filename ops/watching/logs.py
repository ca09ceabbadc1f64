"""The log file of each process in the run directory. The terminal gets sentences instead."""

from __future__ import annotations

import logging
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedemu.coordinator.observer import Absence, Observers
from fedemu.coordinator.record.row import Row
from fedemu.protocol.host.files import refusal_of
from fedemu.protocol.messages import OUTCOMES, UNABLE
from fedemu.protocol.wording import is_milestone

FORMAT = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"


MOST_FAILURES = 100
"""So many different reasons of devices that failed are warnings."""


class LogFile(logging.FileHandler):
    """The handler that ``open_log`` adds. It has a class of its own, so that it can be told from other handlers.

    A line that cannot be written is lost. The first time people are told why, in one sentence.
    """

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            said = f"fedemu: the log {self.baseFilename} cannot be written: {refusal_of(error)}"
            print(said, file=sys.stderr, flush=True)


def open_log(path: Path, level: str = "info") -> None:
    """Send the log records of this process to ``path``, and the warnings of libraries, too."""
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


def log_crash(error: BaseException) -> Path | None:
    """Write the traceback of an internal error into the log, or into a new file if no log is open.

    Returns the file, None if the system lets none be made.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogFile):
            logging.getLogger("fedemu").critical("internal error", exc_info=error)
            return Path(handler.baseFilename)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="fedemu-crash-", suffix=".log", delete=False, encoding="utf-8", errors="backslashreplace"
        ) as file:
            traceback.print_exception(error, file=file)
            print(" ".join(sys.argv), file=file)
    except OSError:
        return None
    return Path(file.name)


def log_failure(error: BaseException) -> Path | None:
    """Write the traceback of somebody else's code into the log. Returns its file, None if no log is open."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogFile):
            logging.getLogger("fedemu").error("%s", error, exc_info=error)
            return Path(handler.baseFilename)
    return None


class LogObserver(Observers):
    """An observer that writes the coordinator's log: rounds, server jobs, refusals; events at the level ``debug``.

    The death of a server job's process and pictures that could not be kept are warnings, because the run goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._log = logging.getLogger("fedemu.coordinator")
        self._rejected: Counter[str] = Counter()
        self._failed: set[str] = set()
        self._tenth: tuple[str, int, int] | None = None
        self._absent = False

    def resumed(self, rows: Sequence[Row], spent: float) -> None:
        self._log.info("resumed at round %d, after %.3f s of real time so far", rows[-1].round + 1, spent)

    def waiting(self, absence: Absence | None) -> None:
        """Write one line when devices are missing, and one when they are back."""
        if absence is not None and not self._absent:
            away = f"; away: {absence.away}" if absence.away else ""
            self._log.warning("%d devices have no connection, %d have one%s", absence.devices, absence.connected, away)
        elif absence is None and self._absent:
            self._log.info("the missing devices are back, or are not waited for any more")
        self._absent = absence is not None

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        self._log.info("round %d, try %d, at %.3f s: %d devices asked", round, attempt + 1, virtual_time, selected)

    def round_finished(self, row: Row) -> None:
        self._log.info("round %s finished: %s", row.round, {column: getattr(row, column) for column in _TOLD})

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        """Write one line for each tenth of a job's steps."""
        tenth = (name, round, 10 * step // max(1, steps))
        if tenth != self._tenth:
            self._tenth = tenth
            self._log.info("round %d, server job %s: step %d of at most %d", round, name, step, steps)

    def rejected(self, reason: str) -> None:
        """Write the first message of a reason, the tenth, the hundredth, and so on: a flood must not fill the disk.

        Machines that cannot take part are told by an event.
        """
        if reason == UNABLE:
            return
        self._rejected[reason] += 1
        count = self._rejected[reason]
        if is_milestone(count):
            self._log.warning("a message was rejected: %s (%d so far)", reason, count)

    def event(self, name: str, **fields: Any) -> None:
        """Write an event. The reason of devices that failed is a warning when it comes the first time.

        A device may give several lines. All but the first are indented, so that none looks like a line of the log.
        """
        if name == "failure" and fields["detail"] not in self._failed and len(self._failed) < MOST_FAILURES:
            self._failed.add(fields["detail"])
            why = (fields["detail"] or fields["reason"]).replace("\n", "\n    ")
            self._log.warning("device %s failed: %s", fields["device"], why)
        self._log.log(logging.WARNING if name in _WARNINGS else logging.DEBUG, "%s %s", name, fields)


_WARNINGS = (
    *("connections_closed", "server_job_died", "pictures_failed", "damage", "arithmetic", "own_states_lost", "unable"),
    *("kept_outside", "state_changed"),
)
_TOLD = ("accuracy", "loss", *OUTCOMES, "round_seconds", "server_seconds")
"""The columns of a row that the log gets."""
