"""Finds processes that should compute and do not.

One that was stopped uses no processor time. One whose GPU is stuck may use a lot of it, and finishes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, Literal

LEAST_SHARE: Final = 0.01
"""A process that uses less than this share of a core does nothing."""
TICKS: Final = os.sysconf("SC_CLK_TCK")
"""The kernel counts the times of processes in units of which a second has so many."""
LONGEST_STEP: Final = 10.0
"""The most seconds that count between two looks. More have passed if the looking process itself stood still."""


def facts_of(pid: int | Literal["self"]) -> list[bytes]:
    """The fields of ``man proc_pid_stat`` behind the name of a process, so from the third one on, its state.

    Raises OSError if the process is gone, and on a system without /proc.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def processor_seconds(pid: int) -> float | None:
    """The processor time that a process has used, in seconds. None if it is gone, or on a system without /proc."""
    try:
        facts = facts_of(pid)
    except OSError:
        return None
    return (int(facts[11]) + int(facts[12])) / TICKS


class Idleness:
    """Watches the processes that have work. ``look`` has to be called every few seconds.

    ``seconds`` is how long a process may do nothing. ``used`` tells the processor time of a process.
    """

    def __init__(self, seconds: float, used: Callable[[int], float | None] = processor_seconds) -> None:
        self._seconds = seconds
        self._used = used
        self._last: dict[int, tuple[float, float, float]] = {}

    def look(self, busy: Mapping[int, int], now: float) -> list[int]:
        """The keys of those processes in ``busy``, by process id, that have done nothing for too long.

        A process that can't be killed, because a driver holds it, is told again after the same time. ``now`` is the
        monotonic clock in seconds.
        """
        seen: dict[int, tuple[float, float, float]] = {}
        idle: list[int] = []
        for key, pid in busy.items():
            used = self._used(pid)
            if used is None:
                continue
            then, before, lost = self._last.get(pid, (now, used, 0.0))
            passed = min(now - then, LONGEST_STEP)
            lost = lost + passed if used - before < LEAST_SHARE * passed or not passed else 0.0
            if lost >= self._seconds:
                idle.append(key)
                lost = 0.0
            seen[pid] = now, used, lost
        self._last = seen
        return idle


class Stuckness:
    """Watches the processes that have work by what they finish. ``look`` has to be called every few seconds.

    ``seconds`` is how long a process may finish nothing.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: dict[int, tuple[float, object, float]] = {}

    def look(self, busy: Mapping[int, tuple[int, object]], now: float) -> list[int]:
        """The keys of those processes in ``busy`` that have finished nothing for too long, as those of ``Idleness``.

        Each has its process id and a value that changes when something is finished. ``now`` is the monotonic clock in
        seconds.
        """
        seen: dict[int, tuple[float, object, float]] = {}
        stuck: list[int] = []
        for key, (pid, finished) in busy.items():
            then, before, lost = self._last.get(pid, (now, finished, 0.0))
            lost = lost + min(now - then, LONGEST_STEP) if finished == before else 0.0
            if lost >= self._seconds:
                stuck.append(key)
                lost = 0.0
            seen[pid] = now, finished, lost
        self._last = seen
        return stuck
