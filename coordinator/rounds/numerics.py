"""A thread in which a coordinator computes, so that its event loop hears the fleet meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TypeVar

from fedemu.coordinator.evaluation.threads import take_threads

T = TypeVar("T")

AT_ONCE_SECONDS = 0.001
"""The patience with a call for which a round waits. The way back from a thread through the event loop takes longer than
most computations with a small model."""


class Numerics:
    """One thread for the tensor work, with ``threads`` of torch's own. It lives as long as the ``with`` block.

    The event loop stands still until a call is done, for ``patience`` seconds at most. Then it goes on beside the call.
    """

    def __init__(self, threads: int, patience: float = 0.0) -> None:
        self._patience = patience
        self._under_way = 0
        self._thread = ThreadPoolExecutor(1, "numerics", initializer=take_threads, initargs=(threads,))

    async def compute(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call ``function`` in the thread, after all earlier calls, and return its result."""
        call = self._thread.submit(function, *arguments)
        if not self._under_way:
            with suppress(TimeoutError):
                result = call.result(self._patience)
                await asyncio.sleep(0)  # many short calls in a row must not keep the loop from all else
                return result
        self._under_way += 1
        try:
            return await asyncio.wrap_future(call)
        finally:
            self._under_way -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.shutdown(wait=True)
