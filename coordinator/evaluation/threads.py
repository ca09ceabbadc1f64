"""Work on batches in several threads at the same time, with the same bits as in one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

import torch

from fedemu.protocol.host.hardware import cores

T = TypeVar("T")
R = TypeVar("R")

MOST_THREADS: Final = 8
"""The most threads. Each holds what a model computes of a batch, which for a ResNet-18 takes 400 MB."""


def most_threads(each: int) -> int:
    """The number of threads for which this process has cores, if each has ``each`` threads of torch's own."""
    return max(1, min(MOST_THREADS, cores() // each))


def in_order(function: Callable[[T], R], items: Iterable[T], threads: int) -> Iterator[R]:
    """The results of ``function`` for all items, in their order, from ``threads`` threads.

    Each thread has as many threads of torch's own as the calling one. At most ``threads`` results wait for their turn.
    With one thread no other one is started.
    """
    if threads == 1:
        yield from map(function, items)
        return
    with ThreadPoolExecutor(threads, "evaluation", take_threads, (torch.get_num_threads(),)) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:  # after an error nothing more is begun
            for result in waiting:
                result.cancel()


def take_threads(count: int) -> None:
    """Let the calling thread compute with ``count`` threads of torch's own."""
    # A thread that has not asked yet takes the number that any thread has set last, such as a trainer's in memory.
    torch.get_num_threads()
    torch.set_num_threads(count)
