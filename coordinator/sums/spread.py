"""Work on parts of large tensors in several threads. Each element is computed by itself, so the bits are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from fedemu.protocol.host.hardware import cores

T = TypeVar("T")
R = TypeVar("R")

PART: Final = 2**16
"""The number of elements in a part. One thread needs milliseconds for a part of a block of payloads."""
_MOST_THREADS: Final = 8
_EACH: Final = 2**21
"""The numbers that a thread has to work on, so that it is worth its start."""


def spread(work: Callable[[T], R], parts: Sequence[T], numbers: int) -> list[R]:
    """The results of ``work`` for all parts, in their order. ``numbers`` is how many numbers the parts have together.

    Few numbers are worked on in the calling thread. Raises what ``work`` raises.
    """
    threads = min(len(parts), numbers // _EACH, _MOST_THREADS)
    if threads < 2 or (threads := min(threads, cores())) < 2:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(threads, "sums") as pool:
        return list(pool.map(work, parts))


def parts_of_elements(size: int) -> Iterable[tuple[int, int]]:
    """The parts of ``size`` elements: where each begins and ends."""
    return ((start, min(start + PART, size)) for start in range(0, size, PART))
