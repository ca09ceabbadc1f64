"""Tells a tracker of a run from what the run directory holds: everything once, however often the run was resumed."""

from __future__ import annotations

import errno
import fcntl
import json
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Final

from fedemu.coordinator.record.json_lines import read_object
from fedemu.coordinator.record.outcome import outcome_of, planned_rounds
from fedemu.coordinator.record.row import RowLog
from fedemu.coordinator.record.run import read_run, read_summary
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import CONFIG_FILE
from fedemu.ops.track.kinds import file_name, tracker, without_password
from fedemu.ops.track.numbers import numbers_of, parameters_of
from fedemu.ops.track.tracker import Ended, Gone, Memory, Tracked
from fedemu.protocol.code.own_code import account
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.files import refusal_by_disk, write_among_others
from fedemu.protocol.host.paths import exists, is_file
from fedemu.protocol.ids import digest_of
from fedemu.protocol.wording import an_object

FOLDER: Final = "track"
"""The folder of a run directory for what trackers write, and for how far they have been told."""
MODEL: Final = "model.safetensors"


class Export:
    """Tells one tracker of the run in ``directory``. What it was told is kept in ``directory/track/``.

    ``out`` is where the tracker writes; empty means that folder. Only one process at a time tells it there. Another one
    can ``wait`` for the place. Raises ConfigurationError if it does not, and whatever the tracker raises.
    """

    def __init__(
        self, directory: Path, name: str, out: str = "", project: str = "fedemu", *, wait: bool = False
    ) -> None:
        run = read_run(directory)
        self.out = out or str((directory / FOLDER / file_name(name)).resolve())
        self._directory, self._name = directory, name
        self._log = RowLog(directory)
        self._state_file = directory / FOLDER / f"{file_name(name)}.json"
        self._place = without_password(_within(directory, self.out))
        self._told = 0
        self._summary: Any = None
        self._tracker = tracker(name)
        self._state_file.parent.mkdir(exist_ok=True)
        lock = self._state_file.with_name(f".{file_name(name)}-{digest_of(self._place.encode())[:8]}.lock")
        self._lock = _alone_with(lock, wait, f"{name} is told of {directory}")
        try:
            self._begin(run.config, project)
        except BaseException:
            self._lock.close()
            raise

    def more(self) -> int:
        """Tell the rows that are new, and keep of each that it was told. Returns their number.

        If this fails, is interrupted or is killed, only the row that was just being told is told again.
        """
        rows = [row for row in self._log.more() if row.round > self._told]
        for row in rows:
            self._tracker.row(row, numbers_of(row))
            self._tracker.flush()
            self._told = row.round
            self._summary = None  # the end that was told before is the end no more
            self._keep()
        return len(rows)

    def end(self) -> None:
        """Tell the rows that are new, and the end of the run if it is over and was not told yet.

        The outcome is that of ``outcome_of``, which may be another one than in ``summary.json``.
        """
        summary = read_summary(self._directory)
        self.more()
        while (now := read_summary(self._directory)) != summary:  # the run has ended meanwhile, after further rows
            summary = now
            self.more()
        if outcome := outcome_of(summary, self._told, planned_rounds(self._tracked.config)):
            summary["outcome"] = outcome
        if summary and summary != self._summary:
            model = self._directory / MODEL
            figures = sorted((self._directory / "plots").glob("*.png"))
            self._tracker.ended(Ended(summary, figures, model if is_file(model) else None))
            self._tracker.flush()
            self._summary = summary
            self._keep()

    def close(self) -> None:
        """End the tracker."""
        with self._lock:
            self._tracker.close()

    def _begin(self, config: str, project: str) -> None:
        """Let the tracker begin where it was."""
        states = self._read_states()
        known = states.get(self._place) or states.get(self.out, {})  # what earlier versions kept had other names
        if "://" not in self.out and not exists(Path(self.out)):
            known = {}  # somebody has removed what was written
        if self._place == without_password(self.out) and _is_copy(self._directory, known.get("home", "")):
            known = {}  # what was told there is told of the run that this one is a copy of
        self._told = int(known.get("told", 0))
        self._summary = known.get("summary")
        table = _settings(config)
        self._tracked = Tracked(
            directory=self._directory,
            name=self._directory.resolve().name,
            digest=str(known.get("digest") or _digest(config)),
            config=config,
            parameters=parameters_of(table),
            out=self.out,
            project=project,
            told=self._told,
            memory=known.get("memory", {}),
        )
        if "://" not in self.out:
            Path(self.out).parent.mkdir(parents=True, exist_ok=True)
        try:
            memory = self._tracker.begin(self._tracked)
        except Gone as gone:
            self._told, self._summary = gone.told, None
            self._tracked = replace(self._tracked, told=gone.told, memory=gone.memory)
            memory = self._tracker.begin(self._tracked)
        self._memory = _checked(memory or {}, self._name)
        self._keep()

    def _read_states(self) -> dict[str, Any]:
        with suppress(ConfigurationError, OSError):
            return dict(read_object(self._state_file.read_bytes(), self._state_file))
        return {}

    def _keep(self) -> None:
        own = {
            "told": self._told,
            "digest": self._tracked.digest,
            "memory": dict(self._memory),
            "summary": self._summary,
            "home": str(self._directory.resolve()),
        }
        # Another command may have told another place meanwhile.
        states = self._read_states()
        states.pop(self.out, None)
        states[self._place] = own
        write_among_others(self._state_file, f"{json.dumps(states)}\n".encode())


def export(directory: Path, name: str, out: str = "", project: str = "fedemu") -> str:
    """Tell a tracker all that it does not know of a run, finished or not. Returns where the tracker has put it.

    Raises ConfigurationError if there is no such run or tracker, or if the tracker fails, and FedemuError if the disk
    is full.
    """
    try:
        exporting = Export(directory, name, out, project)
        try:
            exporting.end()
        finally:
            exporting.close()
    except FedemuError:
        raise
    except Exception as error:
        if refusal := refusal_by_disk(error):
            raise FedemuError(f"{name} failed, because its folder cannot be written: {refusal}") from error
        if isinstance(error, OSError) and error.filename and error.strerror:
            raise ConfigurationError(f"{name} failed: {error.filename} can't be used: {error.strerror}") from error
        raise ConfigurationError(f"{name} failed: {account(error)}") from error
    return exporting.out


def _alone_with(file: Path, wait: bool, what: str) -> IO[bytes]:
    """The open lock ``file``, which no other process holds now. Raises ConfigurationError, with ``what``, if one does.

    If there is one and ``wait`` is set, this returns when it has ended. In a file system without locks nobody waits.
    """
    lock = file.open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            lock.close()
            raise ConfigurationError(
                f"{what} by another process just now; wait until it has ended, or choose another place with --out"
            ) from None
    return lock


def _within(directory: Path, out: str) -> str:
    """The path from the run directory to a place in it, which stays the same if the run is moved. Others stay whole."""
    home = directory.resolve()
    inside = "://" not in out and Path(out).is_relative_to(home)
    return str(Path(out).relative_to(home)) if inside else out


def _is_copy(directory: Path, home: str) -> bool:
    """Whether a run was told of as that in the folder ``home``, which is still there as another run."""
    return bool(home) and is_file(Path(home, CONFIG_FILE)) and not Path(home).samefile(directory)


def _checked(memory: object, name: str) -> Memory:
    """What a tracker's ``begin`` has returned. Raises ConfigurationError unless JSON can keep it."""
    if isinstance(memory, Mapping):
        kept = dict(memory)
        try:
            json.dumps(kept)
        except (TypeError, ValueError) as error:
            problem = str(error)
        else:
            return kept
    else:
        problem = f"it is {an_object(memory)}"
    raise ConfigurationError(
        f"what begin of {name} returns cannot be kept as JSON ({problem}); return a dict of texts, numbers, lists and "
        "dicts, or nothing"
    )


def _settings(config: str) -> dict[str, Any]:
    """The settings of an experiment with their defaults, as they stand if another version has frozen them."""
    try:
        table = tomllib.loads(config)
        with suppress(ConfigurationError):
            table = Experiment.parse(table).table()
    except tomllib.TOMLDecodeError:
        table = {}
    return table


def _digest(config: str) -> str:
    with suppress(ConfigurationError, tomllib.TOMLDecodeError):
        return Experiment.parse(tomllib.loads(config)).digest
    return ""
