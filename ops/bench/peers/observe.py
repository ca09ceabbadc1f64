"""One side at its work, watched from outside: when its rounds are over, and what its processes use."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from fedemu.ops.bench.measuring.processes import cpu_seconds, end
from fedemu.ops.bench.peers.environments import Absent, last_words
from fedemu.protocol.host.paths import exists

SECONDS: Final = 900.0
_POLL_SECONDS: Final = 0.01
_MEMORY_SECONDS: Final = 0.5


@dataclass(frozen=True)
class Observation:
    """What a side did: seconds until the first round was over, then ``rounds`` rounds in ``wall`` and ``cpu`` seconds.

    ``first`` counts from the start of the command, imports and all. ``peak`` is the memory of all its processes in
    units of 10^6 bytes; what several share counts once. ``accuracy`` is the share of test samples that the last model
    tells right, None if the side does not say.
    """

    first: float
    rounds: int
    wall: float
    cpu: float
    peak: float
    accuracy: float | None


def observe(command: Sequence[str], environment: Mapping[str, str], done: Callable[[], int], last: int) -> Observation:
    """Start a side and watch it from the end of its first round to the end of round ``last``.

    ``done`` says how many rounds are over. A side waits on its stdin after the first round and after the last one, as
    ``work.py`` tells; our whole system does not wait. Raises Absent if a side fails, takes too long, or is too fast.
    """
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as answers:
        began = time.monotonic()
        side = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=answers, stderr=errors, text=True, env=dict(environment)
        )
        watch = _Watch(side, done, began)
        try:
            watch.until(1)
            # Our whole system goes on meanwhile, so its clock starts at the count of its rounds.
            rounds, since, used = watch.rounds, time.monotonic(), watch.cpu()
            first = since - began
            assert side.stdin is not None
            side.stdin.write("\n")
            side.stdin.flush()
            watch.until(last)
            wall, cpu = time.monotonic() - since, watch.cpu() - used
            watch.look()
            side.communicate(timeout=SECONDS)
            if side.returncode:
                raise _Ended
            answers.seek(0)
            said = answers.read()
        except (_Ended, subprocess.TimeoutExpired, psutil.NoSuchProcess, BrokenPipeError):
            errors.seek(0)
            raise Absent(last_words(errors.read())) from None
        finally:
            end(side)
    if watch.rounds == rounds:
        raise Absent("its rounds were over before they could be measured")
    accuracy = None
    for line in said.splitlines():
        if line.startswith('{"accuracy"'):
            accuracy = float(json.loads(line)["accuracy"])
    return Observation(first, watch.rounds - rounds, wall, cpu, watch.peak, accuracy)


def lines_of(path: Path) -> Callable[[], int]:
    """A function that counts the lines of a file, which need not exist yet."""
    return lambda: path.read_bytes().count(b"\n") if exists(path) else 0


class _Ended(Exception):
    """The side is over before its time, or too slow."""


class _Watch:
    """Waits for rounds, and looks at the memory meanwhile."""

    def __init__(self, side: subprocess.Popen[str], done: Callable[[], int], began: float) -> None:
        self.rounds = 0
        self.peak = 0.0
        self._side, self._done, self._end = side, done, began + SECONDS
        self._process = psutil.Process(side.pid)
        self._next_look = began

    def until(self, round: int) -> None:
        """Wait until so many rounds are over."""
        while (rounds := self._done()) < round:
            if self._side.poll() is not None or time.monotonic() > self._end:
                raise _Ended
            if time.monotonic() >= self._next_look:
                self.look()
            time.sleep(_POLL_SECONDS)
        self.rounds = rounds

    def cpu(self) -> float:
        """CPU seconds of all processes so far."""
        return sum(self._each(cpu_seconds))

    def look(self) -> None:
        """Look at the memory of all processes."""
        began = time.monotonic()
        self.peak = max(self.peak, sum(self._each(lambda process: process.memory_full_info().pss)) / 1e6)
        taken = time.monotonic() - began
        # A look at 300 processes takes a while, and must not become a part of what is measured.
        self._next_look = began + max(_MEMORY_SECONDS, 20 * taken)

    def _each(self, ask: Callable[[psutil.Process], float]) -> list[float]:
        found = []
        for process in (self._process, *self._process.children(recursive=True)):
            try:
                found.append(float(ask(process)))
            except psutil.Error:
                continue
        return found
