"""A future that was made to fail, and a task that failed by itself."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from fedemu.protocol.host.futures import done_before, fail, listen


async def test_the_first_error_counts() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fail(future, OSError("first"))
    fail(future, OSError("second"))
    with pytest.raises(OSError, match="first"):
        await future


async def test_a_future_that_has_its_result_keeps_it() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(3)
    fail(future, OSError("too late"))
    assert await future == 3


@pytest.mark.parametrize("quiet", [True, False])
async def test_nothing_is_logged_of_an_error_that_nobody_reads(quiet: bool) -> None:
    loop, complaints = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda loop, context: complaints.append(context))
    future: asyncio.Future[None] = loop.create_future()
    if quiet:
        fail(future, OSError("unread"))
    else:
        future.set_exception(OSError("unread"))
    del future
    gc.collect()
    assert len(complaints) == (0 if quiet else 1)


@pytest.mark.parametrize("end", ["error", "result", "cancelled"])
async def test_the_error_of_a_task_for_which_nobody_waits_is_heard(end: str) -> None:
    heard: list[BaseException] = []

    async def work() -> None:
        await asyncio.sleep(0)
        if end == "error":
            raise OSError("unheard")

    task = asyncio.create_task(work())
    listen(task, heard.append)
    await asyncio.sleep(0)
    if end == "cancelled":
        task.cancel()
    await asyncio.wait({task})
    await asyncio.sleep(0)
    assert [*map(str, heard)] == (["unheard"] if end == "error" else [])


@pytest.mark.parametrize("how", ["done", "ended", "cancelled"])
async def test_a_task_is_over_before_whoever_waits_for_it_goes_on(how: str) -> None:
    loop = asyncio.get_running_loop()
    end: asyncio.Future[None] = loop.create_future()
    told: list[str] = []

    async def work() -> str:
        try:
            await asyncio.sleep(0 if how == "done" else 3600)
            return "result"
        finally:
            await asyncio.sleep(0)
            told.append("over")

    task = asyncio.ensure_future(work())
    waiting = asyncio.ensure_future(done_before(task, end, loop.create_future()))
    await asyncio.sleep(0)
    if how == "ended":
        end.set_result(None)
    if how == "cancelled":
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    else:
        assert await waiting == (how == "done")
    assert told == ["over"]
    assert task.cancelled() == (how != "done")
