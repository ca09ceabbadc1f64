"""How a future is made to fail, and how the failure of a task is heard for which nobody waits."""

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
