"""How a future is made to fail, how the failure of a task is heard for which nobody waits, and how a task is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End ``future`` with ``error``, unless it has ended before.

    Whoever waits gets the error. If nobody waits any more, because something else has ended the wait, asyncio does not
    log that nobody has read the error.
    """
    if not future.done():
        future.set_exception(error)
        future.exception()


def listen(task: asyncio.Future[Any], failed: Callable[[BaseException], None]) -> None:
    """Call ``failed`` with the error of a task that ends with one. Otherwise asyncio would only log it, and late."""

    def over(task: asyncio.Future[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task.add_done_callback(over)


async def done_before(task: asyncio.Future[Any], *ends: asyncio.Future[Any]) -> bool:
    """Wait until ``task`` is done, or one of ``ends``. Returns whether the task is done by itself.

    If it is not, or if whoever waits is cancelled, the task is cancelled, and over when this ends.
    """
    try:
        await asyncio.wait({task, *ends}, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
