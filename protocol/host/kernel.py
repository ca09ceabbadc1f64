"""What fedemu asks of the Linux kernel and of glibc beyond the standard library.

A process ends with its parent, has a name, keeps one heap and large blocks, gives memory back, and joins the network of
another one. On other systems the requests are left out. A process may then live on until it notices by itself that its
parent is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_CLONE_NEWNET = 0x40000000
_KEPT_BYTES = 2_000_000_000
_libc = ctypes.CDLL(None, use_errno=True)


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL, code: int = 0) -> None:
    """Have the kernel send this process the signal ``number`` when ``parent`` (its process id) ends.

    If the parent has ended already, this process exits at once with ``code``.
    """
    _control(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(code)


def stop_signals() -> list[signal.Signals]:
    """The signals by which people stop a process: SIGINT, SIGTERM, and SIGHUP unless it is ignored, as under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM, *([] if ignored else [signal.SIGHUP])]


def name_process(name: str) -> None:
    """Set the name that ``ps`` and ``top`` show: at most 15 bytes, the rest is cut off."""
    _control(_PR_SET_NAME, name.encode()[:15])


def keep_one_heap() -> None:
    """Have all threads of this process allocate from one heap, also those that begin later.

    By default glibc gives threads heaps of their own. What one thread allocates and another one frees leaves holes
    there, so that a process with several threads grows with each round, by kilobytes, for as long as it runs.
    """
    if sys.platform == "linux" and hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)


def keep_blocks() -> None:
    """Have this process keep the memory of large blocks that it frees for the next ones that it needs.

    By default glibc gives each of them back to the system at once, and the pages of the next one have to be faulted in
    again. What is kept goes back by ``give_memory_back``.
    """
    if sys.platform == "linux" and hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        _libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def give_memory_back() -> None:
    """Give memory that is free back to the system. glibc keeps what was once needed, for a peak that may not return."""
    if sys.platform == "linux" and hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def join_network(process: int) -> None:
    """Move this thread, and what it starts, into the network namespace of a process. Raises OSError if it may not."""
    with open(f"/proc/{process}/ns/net") as namespace:
        if _libc.setns(namespace.fileno(), _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


def _control(option: int, argument: int | bytes) -> None:
    if sys.platform == "linux":
        _libc.prctl(option, argument, 0, 0, 0)
