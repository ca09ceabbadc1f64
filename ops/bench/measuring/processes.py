"""Figures of running processes (their beginning, the memory that is theirs alone, their CPU time), and their end."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import psutil


def now() -> float:
    """Seconds since the machine started, on the clock of ``began``."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def began(pid: int) -> float:
    """When the process was forked, in seconds since the machine started, to 10 ms."""
    return float(psutil.Process(pid).create_time() - psutil.boot_time())


def cpu_seconds(process: psutil.Process) -> float:
    """CPU seconds that the process has used, with those of its children that have ended and were waited for.

    The children's are exact to 20 ms, its own to less than a microsecond: a device process uses a few milliseconds in
    a whole benchmark, of which ``/proc`` only tells multiples of 10 ms. Raises psutil.NoSuchProcess if it is gone.
    """
    try:
        # The number of a process's CPU clock, as ``clock_getcpuclockid`` in the C library makes it.
        own = time.clock_gettime((~process.pid << 3) | 2)
    except OSError:
        raise psutil.NoSuchProcess(process.pid) from None
    times = process.cpu_times()
    return own + float(times.children_user + times.children_system)


def private_megabytes(pid: int) -> float:
    """The memory that would be free if the process ended: what it shares with no other process (10^6 bytes)."""
    return float(psutil.Process(pid).memory_full_info().uss) / 1e6


def memory_of(pids: Iterable[int]) -> list[float]:
    """The private memory of each process that still lives, in units of 10^6 bytes."""
    found = []
    for pid in pids:
        try:
            found.append(private_megabytes(pid))
        except psutil.NoSuchProcess:
            continue
    return found


def descendants(pid: int, name: str) -> list[int]:
    """The process ids of the living descendants with this name."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if process.name() == name:
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def end(process: subprocess.Popen[Any], seconds: float = 30.0) -> None:
    """End a process and its descendants, if it has not ended by itself. What still lives ``seconds`` later is killed.

    A killed process goes on until the kernel comes to it, so this waits for the end of each: 10 s at most.
    """
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        _, alive = psutil.wait_procs([psutil.Process(process.pid), *family], seconds)
        for each in alive:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(alive, 10.0)
        process.wait(10.0)
