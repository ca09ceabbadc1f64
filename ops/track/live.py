"""Trackers that follow a run: each is a process of its own, which can fail or hang without harm to the run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from fedemu.coordinator.observer import Observers
from fedemu.coordinator.record.row import Row
from fedemu.ops.experiment.runtime import Track
from fedemu.ops.terminal import last_words
from fedemu.ops.track.export import FOLDER
from fedemu.ops.track.kinds import check, places, whole, without_password
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.files import write_whole
from fedemu.protocol.wording import refusal

TRACKERS: Final = "trackers.json"
"""The file beside what trackers know, with the settings of those that followed the run last."""
Command = Callable[..., list[str]]
"""Makes the command of a child: it takes the name of the process, a module with ``main``, and arguments."""


class Followers(Observers):
    """Tells the processes of trackers of every round. Nothing here waits, apart from ``close``."""

    def __init__(self, directory: Path, track: Track, command: Command, say: Callable[[str], None]) -> None:
        super().__init__()
        self._directory = directory
        self._track = track
        self._say = say
        self._told: set[str] = set()
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: dict[str, Path] = {}
        self._outs = places(track.to, track.out)
        for name, out in self._outs.items():
            words = command("fedemu-track", "fedemu.ops.track.follow", str(directory), name)
            try:
                self._start(name, words, json.dumps({"out": out, "project": track.project}))
            except OSError as error:
                self._fail(name, refusal(error))

    def round_finished(self, row: Row) -> None:
        for name, child in self._children.items():
            if name in self._told or child.stdin is None:
                continue
            try:
                os.write(child.stdin.fileno(), b"\n")
            except BlockingIOError:
                pass  # it has not read hundreds of lines yet, and the next one it reads tells it of this round, too
            except OSError:
                self._fail(name, self._last_word(name))

    def close(self) -> None:
        """Let the trackers tell the end of the run. One that takes longer than ``track.patience`` is killed."""
        ends = time.monotonic() + self._track.patience
        for child in self._children.values():
            if child.stdin is not None:
                with contextlib.suppress(OSError):
                    child.stdin.close()
        for name, child in self._children.items():
            try:
                code = child.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                self._fail(name, f"it was not done {self._track.patience:g} s after the run, and was ended")
            else:
                if code:
                    self._fail(name, self._last_word(name))

    def _start(self, name: str, words: Sequence[str], settings: str) -> None:
        folder = self._directory / "logs"
        folder.mkdir(exist_ok=True)
        self._logs[name] = folder / f"{FOLDER}-{len(self._logs)}.log"
        with self._logs[name].open("ab") as log:
            child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
        self._children[name] = child
        if child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # why it has ended is told with the others
                os.write(child.stdin.fileno(), settings.encode() + b"\n")
            os.set_blocking(child.stdin.fileno(), False)

    def _last_word(self, name: str) -> str:
        return last_words(self._logs[name]).partition("\n")[0] or "it ended without a word"

    def _fail(self, name: str, why: str) -> None:
        if name in self._told:
            return
        self._told.add(name)
        sentence = f"tracking to {name} failed ({why}); the run is not harmed"
        logging.getLogger(__name__).warning("%s", sentence)
        again = ["fedemu", "export", str(self._directory), "--to", name]
        again += ["--out", without_password(self._outs[name])] if self._outs[name] else []
        again += ["--project", self._track.project] if self._track.project != Track().project else []
        self._say(f"{sentence}, and `{shlex.join(again)}` tries again")


@contextlib.contextmanager
def followers(directory: Path, track: Track, command: Command, say: Callable[[str], None]) -> Iterator[list[Observers]]:
    """The observers that tell ``track.to`` of a run, or without any those that followed it before it was resumed.

    At the end they have been told of its end, too.
    """
    track = _as_before(directory / FOLDER / TRACKERS, track, say)
    if not track.to:
        yield []
        return
    following = Followers(directory, track, command, say)
    try:
        yield [following]
    finally:
        following.close()


def _as_before(file: Path, track: Track, say: Callable[[str], None]) -> Track:
    """The settings of this command, which are kept in ``file``, or if it names no tracker those that are kept there."""
    if track.to:
        track = track.model_copy(update={"out": whole(track.out)})
        with contextlib.suppress(OSError, FedemuError):
            file.parent.mkdir(exist_ok=True)
            write_whole(file, track.model_dump_json() + "\n", private=True)
        return track
    try:
        before = Track.parse(json.loads(file.read_bytes()))
        check(before.to, before.out)
    except FileNotFoundError:
        return track
    except (OSError, ValueError, RecursionError, ConfigurationError) as error:
        say(f"the trackers that followed the run before do not go on: {error}")
        return track
    return before
