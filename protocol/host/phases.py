"""Where the time of a run goes: each process marks the ends of its phases in one file, if it is asked to.

The variable ``FEDEMU_TIMING`` names the file. ``ops/running/timing.py`` makes a table of it. This file imports next to
nothing, so that a process can mark the end of its imports, and that costs nothing where nobody asked.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fedemu.protocol.host.idleness import TICKS, facts_of, processor_seconds

VARIABLE: Final = "FEDEMU_TIMING"
"""The environment variable with the path of the file. Without it nothing is marked."""
_parts: dict[str, list[float]] = {}
"""Wall time and CPU of each part of this process's phase, since its last mark."""


def marks() -> bool:
    """Whether this run marks phases."""
    return bool(os.environ.get(VARIABLE))


def mark(process: str, phase: str, others: Callable[[], Mapping[str, float]] = dict) -> None:
    """Say that ``process`` is at the end of ``phase``, which began at its mark before, or at its own start.

    ``others`` tells the CPU, in seconds, that other processes have used so far, by a name. It is for processes that
    say nothing themselves.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    line = {
        "process": process,
        "pid": os.getpid(),
        "phase": phase,
        "began": _began(),
        "at": time.monotonic(),
        "cpu": time.process_time(),
        "ended": _ended(),
        "parts": dict(_parts),
        "others": dict(others()),
    }
    _parts.clear()
    # A measurement that cannot be kept, such as on a full disk, must not harm the run.
    with suppress(OSError), open(path, "ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


@contextmanager
def part(name: str) -> Iterator[None]:
    """Measure a part of this process's phase: its wall time, and the CPU of the thread that runs it."""
    if not marks():
        yield
        return
    began, used = time.monotonic(), time.thread_time()
    try:
        yield
    finally:
        sums = _parts.setdefault(name, [0.0, 0.0])
        sums[0] += time.monotonic() - began
        sums[1] += time.thread_time() - used


def used(pids: Iterable[int]) -> float:
    """The CPU of these processes, in seconds. A process that is gone counts as 0."""
    return sum(_exactly(pid) or processor_seconds(pid) or 0.0 for pid in pids)


def _exactly(pid: int) -> float:
    """The CPU of a process by its threads. The sums of the kernel have steps of 10 ms, which is more than a device
    needs to attach. 0 if the kernel does not tell it."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
        return sum(int(Path(f"/proc/{pid}/task/{task}/schedstat").read_bytes().split()[0]) for task in tasks) / 1e9
    except OSError:
        return 0.0


def used_by_ended(pid: int) -> float:
    """The CPU of the children of process ``pid`` that have ended, in seconds. 0 if that cannot be read."""
    try:
        facts = facts_of(pid)
    except OSError:
        return 0.0
    return (int(facts[13]) + int(facts[14])) / TICKS


def _began() -> float:
    """When this process was started, by the monotonic clock. Now, on a system without /proc."""
    try:
        ticks = int(facts_of("self")[19])
    except OSError:
        return time.monotonic()
    since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / TICKS
    return time.monotonic() - since_boot


def _ended() -> float:
    """The CPU of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
