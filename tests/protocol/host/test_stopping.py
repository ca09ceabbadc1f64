"""A process with an event loop hears the first signal that is to stop it, and only in its main thread."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from fedemu.protocol.host.stopping import hearing_stop


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    """What other tests, or libraries that they used, have left at the signals counts again after the test."""
    usual = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    former = {sign: signal.signal(sign, handler) for sign, handler in usual.items()}
    yield
    for sign, handler in former.items():
        if handler is not None:  # one of C cannot be put back
            signal.signal(sign, handler)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_the_first_signal_that_is_to_stop_a_process_is_heard_and_no_other_after_it(sign: signal.Signals) -> None:
    told: list[str] = []
    later: list[int] = []

    def handler(number: int, frame: object) -> None:
        later.append(number)

    signal.signal(signal.SIGTERM, handler)
    of_before = signal.getsignal(signal.SIGINT)
    with hearing_stop(told.append):
        for each in (sign, signal.SIGTERM, sign):
            os.kill(os.getpid(), each)
            for _ in range(3):
                await asyncio.sleep(0)
    assert (told, later) == ([sign.name], [])
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP)) == (of_before, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    assert later == [signal.SIGTERM], "the handlers are those of before"


async def test_a_signal_that_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    with hearing_stop(pytest.fail):
        os.kill(os.getpid(), signal.SIGHUP)
        for _ in range(3):
            await asyncio.sleep(0)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_another_thread_than_the_main_one_hears_no_signals() -> None:
    within: list[object] = []

    async def look() -> None:
        with hearing_stop(lambda name: None):
            within.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=asyncio.run, args=(look(),))
    thread.start()
    thread.join(60)
    assert within == [signal.SIG_DFL]
