"""A thread in which a coordinator computes, so that its event loop hears the fleet meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

T = TypeVar("T")


class Numerics:
    """One thread for the tensor work, with ``threads`` of torch's own. It lives as long as the ``with`` block."""

    def __init__(self, threads: int) -> None:
        self._thread = ThreadPoolExecutor(1, "numerics", initializer=torch.set_num_threads, initargs=(threads,))

    async def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function`` in the thread, after all earlier calls, and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
