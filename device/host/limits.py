"""Whether this machine can hold its devices. Descriptors, processes and memory are checked before anything starts."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.hardware import control_groups, kernel_number
from fedemu.protocol.host.open_files import allow_open_files, most_open_files

PROCESS_BYTES = 6 * 2**20
"""The private memory of a device process in bytes, with the kernel's memory for it."""
DEVICE_BYTES = 2**18
"""The memory in bytes that each device of a process adds."""
TRAINER_BYTES = 400 * 2**20
"""The memory of a trainer in bytes."""
THREADS_WITH_KEYS = 3
"""Threads of a device process with keys: its main thread and two threads of ZeroMQ. Without keys it has one thread."""
SPARE_FILES = 128
"""Descriptors of a process besides those that ``demand`` counts one by one."""
FILES_PER_DEVICE = 4
"""Descriptors of one device, counted while its old connection still lingers beside the new one."""
PACK: Final = 50
"""The most devices that are awake in one process where they sleep, unless ``--per-process`` says how many."""

_limiting = threading.RLock()


@dataclass(frozen=True)
class MachineLimits:
    """The resources that this machine has for devices. None means that the system does not tell. Memory is in bytes."""

    files_hard: int
    threads: int | None
    """Processes and threads that can still be started."""
    memory: int | None


def demand(count: int, per_process: int, trainers: int, keys: bool = False) -> tuple[int, int, int]:
    """The needs of ``count`` devices: descriptors of the largest process, threads of all processes, bytes of memory.

    ``keys`` says whether devices have connections with keys.
    """
    processes = -(-count // per_process)
    files = SPARE_FILES + max(2 * (processes + trainers), FILES_PER_DEVICE * min(per_process, count))
    threads = (THREADS_WITH_KEYS if keys else 1) * processes + 8 * trainers + 16
    return files, threads, PROCESS_BYTES * processes + DEVICE_BYTES * count + TRAINER_BYTES * trainers


def check(count: int, per_process: int, trainers: int, machine: MachineLimits, keys: bool = False) -> None:
    """Raise ConfigurationError if ``machine`` has too little of anything. The error says what to do."""
    files, threads, memory = demand(count, per_process, trainers, keys)
    if files > machine.files_hard:
        raise ConfigurationError(
            f"{count} devices need {files} open files in one process, but at most {machine.files_hard} are allowed; "
            f"raise the limit (ulimit -Hn {files}), or change --per-process."
        )
    if machine.threads is not None and threads > machine.threads:
        fits = (size for size in range(2, count + 1) if demand(count, size, trainers, keys)[1] <= machine.threads)
        packing = next(fits, None)
        packed = f", or pack devices with --per-process {packing}" if packing else ""
        raise ConfigurationError(
            f"{count} devices need {threads} processes and threads, but only {machine.threads} more can be started; "
            f"raise the limit (ulimit -u, or pids.max of the container){packed}."
        )
    if machine.memory is not None and memory > machine.memory:
        named = f"{trainers} trainer{'s' * (trainers != 1)}"
        raise ConfigurationError(
            f"{count} devices and {named} need about {memory / 2**30:.1f} GiB of memory, but "
            f"{machine.memory / 2**30:.1f} GiB are available; start fewer devices or fewer --trainers, or pack devices "
            "with --per-process."
        )


def allow_files(count: int, per_process: int, trainers: int) -> None:
    """Raise the limit of open files to what this process and its children will need, or as far as it may be."""
    files, _, _ = demand(count, per_process, trainers)
    allow_open_files(files)


def require_room(count: int, per_process: int, trainers: int, keys: bool) -> None:
    """Raise ConfigurationError if this machine cannot hold the devices. ``keys`` is as for ``demand``."""
    check(count, per_process, trainers, this_machine(), keys)


def pack_size(per_process: int) -> int:
    """The most devices that are awake in one process where devices sleep until they are asked."""
    return per_process if per_process > 1 else PACK


def this_machine() -> MachineLimits:
    """The limits of the machine that this process runs on."""
    return MachineLimits(most_open_files(), _threads(), free_memory())


def _threads() -> int | None:
    """The number of threads that can still be started: the least that a limit of user, container or kernel leaves."""
    left = []
    with suppress(OSError, IndexError):  # psutil takes for granted that an existing /proc is not empty
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
            left.append(soft - _threads_of_user())
    for folder in control_groups("pids"):
        if (most := kernel_number(folder / "pids.max")) is not None:
            left.append(most - (kernel_number(folder / "pids.current") or 0))
    if (most := kernel_number(Path("/proc/sys/kernel/threads-max"))) is not None:
        left.append(most)
    if (most := kernel_number(Path("/proc/sys/kernel/pid_max"))) is not None:
        left.append(most)
    return max(0, min(left)) if left else None


def _threads_of_user() -> int:
    mine = os.getuid()
    found = (process.info for process in psutil.process_iter(["uids", "num_threads"]))
    return sum(facts["num_threads"] or 0 for facts in found if facts["uids"] and facts["uids"].real == mine)


def free_memory() -> int | None:
    """Free memory in bytes: what the machine has available, or what the container has left if that is less.

    None means that the system does not tell.
    """
    left = []
    with suppress(OSError):
        left.append(int(psutil.virtual_memory().available))
    for folder in control_groups("memory"):
        if (most := kernel_number(folder / "memory.max", folder / "memory.limit_in_bytes")) is not None:
            used = kernel_number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
            left.append(most - max(0, used - _cached(folder)))
    return max(0, min(left)) if left else None


@contextmanager
def only_free_memory() -> Iterator[None]:
    """Refuse this process more memory than is free now: an allocation beyond it fails.

    Without this Linux may grant memory that it does not have (``vm.overcommit_memory``), and end the process, or
    another one, when it is used.
    """
    with _limiting, ExitStack() as stack:
        with suppress(OSError, ValueError, psutil.Error):  # a system that tells too little, or refuses limits
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            if (free := free_memory()) is not None:
                most = psutil.Process().memory_info().data + free
                known = [limit for limit in (most, soft) if limit != resource.RLIM_INFINITY]
                resource.setrlimit(resource.RLIMIT_DATA, (min(known), hard))
                stack.callback(resource.setrlimit, resource.RLIMIT_DATA, (soft, hard))
        yield


def _cached(group: Path) -> int:
    """Bytes of files that a control group keeps in memory. They count as used, and the kernel frees them at need."""
    try:
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    # Version 1 counts the groups below in figures of their own.
    return sum(int(facts.get(f"total_{name}", facts.get(name, 0))) for name in ("inactive_file", "active_file"))
