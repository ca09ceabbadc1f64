"""How a future is made to fail."""

from __future__ import annotations

import asyncio
from typing import Any


def fail(future: asyncio.Future[Any], error: BaseException) -> None:
    """End ``future`` with ``error``, unless it has ended before.

    Whoever waits gets the error. If nobody waits any more, because something else has ended the wait, asyncio does not
    log that nobody has read the error.
    """
    if not future.done():
        future.set_exception(error)
        future.exception()
