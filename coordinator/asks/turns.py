"""The events of one ask in their order, although the check of a large reply happens apart from the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

Apart = Callable[..., Awaitable[Any]]
"""Calls a function with arguments in a thread, after all earlier calls, as ``Numerics.compute`` does."""


class Turns:
    """Handles events one after another. An event may have work done apart; all later events then wait for its end.

    So an ask goes as if every event took no time: each is handled with the time at which it came. ``failed`` gets
    whatever an event raises that had to wait, or its work.
    """

    def __init__(self, apart: Apart, failed: Callable[[Exception], None]) -> None:
        self._apart = apart
        self._failed = failed
        self._waiting: deque[Callable[[], None]] = deque()
        self._working: asyncio.Future[Any] | None = None

    @property
    def busy(self) -> bool:
        """Whether events wait for work that is done apart."""
        return self._working is not None

    def take(self, event: Callable[[], None]) -> None:
        """Handle an event now, or when all earlier ones are handled."""
        if self._working is None:
            event()
        else:
            self._waiting.append(event)

    def work(self, function: Callable[..., Any], *arguments: Any, then: Callable[[Any], None]) -> None:
        """Have an event's work done apart. ``then`` gets the result, and ends the event."""
        self._working = asyncio.ensure_future(self._apart(function, *arguments))
        self._working.add_done_callback(lambda done: self._done(done, then))

    def close(self) -> None:
        """Forget what waits, and whom to tell. A result that still comes is dropped."""
        self._waiting.clear()
        self._failed = lambda error: None
        if self._working is not None:
            self._working.cancel()

    def _done(self, done: asyncio.Future[Any], then: Callable[[Any], None]) -> None:
        if done.cancelled():
            return
        self._working = None
        try:
            then(done.result())
            while self._waiting and self._working is None:
                self._waiting.popleft()()
        except Exception as error:
            self._failed(error)
