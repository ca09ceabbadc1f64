"""Finds processes that should compute and do not.

One that was stopped uses no processor time. One whose GPU is stuck may use a lot of it, and finishes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Final, Literal

LEAST_SHARE: Final = 0.01
"""A process that uses no more than this share of a core does nothing."""
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


class Stuckness:
    """Watches the processes that have work by what they get done. ``look`` has to be called every few seconds.

    ``seconds`` is how long a process may do no more than ``least`` a second.
    """

    def __init__(self, seconds: float, least: float = 0.0) -> None:
        self._seconds = seconds
        self._least = least
        self._last: dict[int, tuple[float, float, float]] = {}

    def look(self, busy: Mapping[int, tuple[int, float]], now: float) -> list[int]:
        """The keys of those processes in ``busy`` that have done too little for too long.

        Each has its process id and a number that grows with what it has done. A process that can't be killed, because a
        driver holds it, is told again after the same time. ``now`` is the monotonic clock in seconds.
        """
        seen: dict[int, tuple[float, float, float]] = {}
        stuck: list[int] = []
        for key, (pid, done) in busy.items():
            then, before, lost = self._last.get(pid, (now, done, 0.0))
            passed = min(now - then, LONGEST_STEP)
            lost = lost + passed if done - before <= self._least * passed else 0.0
            if lost >= self._seconds:
                stuck.append(key)
                lost = 0.0
            seen[pid] = now, done, lost
        self._last = seen
        return stuck


class Idleness:
    """Watches the processes that have work by the processor time that they use, which ``used`` tells, as Stuckness."""

    def __init__(self, seconds: float, used: Callable[[int], float | None] = processor_seconds) -> None:
        self._watch = Stuckness(seconds, LEAST_SHARE)
        self._used = used

    def look(self, busy: Mapping[int, int], now: float) -> list[int]:
        """The keys of those processes in ``busy``, by process id, that have done nothing for too long."""
        known = {key: (pid, used) for key, pid in busy.items() if (used := self._used(pid)) is not None}
        return self._watch.look(known, now)
