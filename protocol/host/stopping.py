"""How a process with an event loop hears that people want to stop it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import Signals

from fedemu.protocol.host.kernel import stop_signals


@contextmanager
def hearing_stop(stop: Callable[[str], object]) -> Iterator[None]:
    """In this block the first of ``stop_signals`` calls ``stop`` with its name, on the running event loop.

    Others after it do nothing. Behind the block signals have the handlers that they had before: asyncio alone would
    leave the default ones, which end a process without its code while it closes what it has open. Only the main thread
    hears signals; in any other this does nothing.
    """
    loop = asyncio.get_running_loop()
    heard: list[Signals] = []

    def hear(sign: Signals) -> None:
        heard.append(sign)
        if len(heard) == 1:
            stop(sign.name)

    signs = stop_signals() if threading.current_thread() is threading.main_thread() else []
    former = {sign: signal.getsignal(sign) for sign in signs}
    for sign in signs:
        loop.add_signal_handler(sign, hear, sign)
    try:
        yield
    finally:
        for sign, handler in former.items():
            loop.remove_signal_handler(sign)
            if handler is not None:  # one of C cannot be put back
                signal.signal(sign, handler)
