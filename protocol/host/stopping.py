"""How a process with an event loop hears that people want to stop it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import Signals

from fedemu.protocol.host.kernel import stop_signals


@contextmanager
def hearing_stop(stop: Callable[[str], object]) -> Iterator[None]:
    """In this block the first of ``stop_signals`` calls ``stop`` with its name, on the running event loop.

    Others after it do nothing. Only the main thread hears signals; in any other this does nothing.
    """
    loop = asyncio.get_running_loop()
    heard: list[Signals] = []

    def hear(sign: Signals) -> None:
        heard.append(sign)
        if len(heard) == 1:
            stop(sign.name)

    signs = stop_signals() if threading.current_thread() is threading.main_thread() else []
    for sign in signs:
        loop.add_signal_handler(sign, hear, sign)
    try:
        yield
    finally:
        for sign in signs:
            loop.remove_signal_handler(sign)
