"""The thread in which a coordinator computes: what the event loop does meanwhile."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from fedemu.coordinator.rounds.numerics import Numerics
from fedemu.device.compute.trainer import open_device

LONG = 60.0
"""A patience that no call of these tests exhausts."""


async def test_a_long_call_does_not_hold_the_loop_and_none_behind_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits, result, heard = list[float](), Future.result, threading.Event()

    def waited(call: Future[object], timeout: float | None = None) -> object:
        if timeout is not None:
            waits.append(timeout)
        return result(call, timeout)

    monkeypatch.setattr(Future, "result", waited)
    with Numerics(1, patience=0.001) as numerics:
        calls = [asyncio.create_task(numerics.compute(call)) for call in (lambda: heard.wait(LONG), int, int)]
        asyncio.get_running_loop().call_soon(heard.set)
        assert await asyncio.gather(*calls) == [True, 0, 0]
        assert waits == [0.001]
        assert await numerics.compute(int) == 0
    assert waits == [0.001, 0.001]


async def test_without_patience_the_loop_goes_on_at_once() -> None:
    heard = threading.Event()
    with Numerics(1) as numerics:
        asyncio.get_running_loop().call_soon(heard.set)
        assert await numerics.compute(heard.wait, LONG)


async def test_the_loop_stands_still_for_a_short_call() -> None:
    heard = threading.Event()
    with Numerics(1, patience=LONG) as numerics:
        asyncio.get_running_loop().call_soon(heard.set)
        assert await numerics.compute(heard.wait, 0.05) is False
        assert heard.is_set()
        assert await numerics.compute(divmod, 7, 2) == (3, 1)


async def test_calls_are_made_one_after_another_and_the_last_one_before_the_thread_ends() -> None:
    begun, made = threading.Event(), []

    def slow() -> None:
        assert begun.wait(LONG)
        made.append("slow")

    with Numerics(1) as numerics:
        calls = [asyncio.create_task(numerics.compute(call)) for call in (slow, lambda: made.append("next"))]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.05, begun.set)
        await asyncio.gather(*calls)
        begun.clear()
        calls = [asyncio.create_task(numerics.compute(slow))]
        await asyncio.sleep(0)
        threading.Timer(0.05, begun.set).start()
    assert made == ["slow", "next", "slow"]
    await calls[0]


async def test_others_get_their_turn_between_short_calls() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with Numerics(1, patience=LONG) as numerics:
        task = asyncio.create_task(other())
        for _ in range(20):
            await numerics.compute(int)
        task.cancel()
    assert turns >= 19


@pytest.mark.parametrize("patience", [0.0, LONG])
@pytest.mark.parametrize("error", [ValueError, TimeoutError])
async def test_an_error_reaches_the_caller(patience: float, error: type[Exception]) -> None:
    def fail() -> None:
        raise error("why")

    with Numerics(1, patience) as numerics, pytest.raises(error, match="why"):
        await numerics.compute(fail)


async def test_a_trainer_beside_it_in_memory_leaves_each_its_own_number_of_threads() -> None:
    with Numerics(2) as numerics, ThreadPoolExecutor(1) as trainer:
        await numerics.compute(int)
        trainer.submit(open_device, "cpu").result()
        with Numerics(2) as beside:
            await beside.compute(int)
            computing = [await each.compute(torch.get_num_threads) for each in (numerics, beside)]
        assert [*computing, trainer.submit(torch.get_num_threads).result()] == [2, 2, 1]
