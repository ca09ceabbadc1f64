"""What the kernel knows of processes: when they began, what memory is theirs alone, what CPU time they have used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_TICKS = os.sysconf("SC_CLK_TCK")


def now() -> float:
    """Seconds since boot, the clock of ``began``."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def began(pid: int) -> float:
    """When the process was forked, in seconds since boot, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[19]) / _TICKS


def private_megabytes(pid: int) -> float:
    """Memory that would be free if the process were gone: what it shares with nobody, clean and dirty (10^6 bytes)."""
    total = 0
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith(("Private_Clean:", "Private_Dirty:")):
            total += int(line.split()[1])
    return total * 1024 / 1e6


def memory_of(pids: Iterable[int]) -> list[float]:
    """The private memory of those that still live."""
    found = []
    for pid in pids:
        try:
            found.append(private_megabytes(pid))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def descendants(pid: int, name: str) -> list[int]:
    """Living descendants of this name."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if process.name() == name:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
