"""A coordinator and its devices in one process: whose error is told, and who ends whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedemu.ops.experiment import Runtime
from fedemu.ops.running import embedded
from fedemu.ops.running.embedded import serve_embedded
from fedemu.protocol.errors import FedemuError, Interrupted, QuorumError


@dataclass(frozen=True)
class Plan:
    """What ``serve_embedded`` reads of the plan of a coordinator."""

    opened: Callable[[str], None] = lambda address: None
    network: Any = None
    address: str = ""
    directory: Path = Path()
    settings: Any = field(default_factory=lambda: SimpleNamespace(devices=3))
    at_rest: Callable[[], Awaitable[None]] | None = None


def played(monkeypatch: pytest.MonkeyPatch, serve: Any, embed: Any) -> Any:
    monkeypatch.setattr(embedded, "serve", serve)
    monkeypatch.setattr(embedded, "embed", embed)
    return asyncio.run(serve_embedded(Plan(), Runtime(transport="memory")))  # type: ignore[arg-type]


async def no_room(plan: object) -> None:
    raise ValueError("no room for the devices")


async def until_cancelled(plan: object) -> None:
    await asyncio.Event().wait()


def test_if_both_sides_fail_the_error_of_the_devices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(plan: Plan) -> None:
        plan.opened("here")
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("the disk is full")

    with pytest.raises(ValueError, match="no room for the devices"):
        played(monkeypatch, serve, no_room)


def test_a_coordinator_whose_devices_have_failed_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(plan: Plan) -> None:
        plan.opened("here")
        await asyncio.Event().wait()

    with pytest.raises(ValueError, match="no room for the devices"):
        played(monkeypatch, serve, no_room)


def test_the_error_of_a_coordinator_ends_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(plan: Plan) -> None:
        plan.opened("here")
        raise OSError("the disk is full")

    monkeypatch.setattr(embedded, "DEPARTURE_SECONDS", 0.01)
    with pytest.raises(OSError, match="the disk is full"):
        played(monkeypatch, serve, until_cancelled)


def test_devices_that_fail_when_the_run_is_over_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve(plan: Plan) -> str:
        plan.opened("here")
        return "the summary"

    assert played(monkeypatch, serve, no_room) == "the summary"


def test_devices_look_for_the_coordinator_where_it_listens_and_not_where_it_was_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = []

    async def serve(plan: Plan) -> None:
        plan.opened("tcp://127.0.0.1:1")
        await asyncio.sleep(0)

    async def embed(plan: Any) -> None:
        places.append(plan.address)

    played(monkeypatch, serve, embed)
    assert places == ["tcp://127.0.0.1:1"]


def test_the_coordinator_can_wait_until_its_devices_compute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    done = []

    async def train(number: int, plan: Any) -> None:
        if number < 2:  # what is trained may be followed by more
            plan.computing.add(asyncio.create_task(train(number + 1, plan)))
        await asyncio.sleep(0)
        done.append(number)
        plan.computing.discard(asyncio.current_task())

    async def embed(plan: Any) -> None:
        plan.computing.add(asyncio.create_task(train(0, plan)))
        begun.set()

    async def serve(plan: Plan) -> list[int]:
        assert plan.at_rest is not None
        plan.opened("here")
        await begun.wait()
        await plan.at_rest()
        return sorted(done)

    assert played(monkeypatch, serve, embed) == [0, 1, 2]


async def until_it_may_train(plan: Any, may: asyncio.Event) -> None:
    await may.wait()
    plan.computing.discard(asyncio.current_task())


@pytest.mark.parametrize(
    ("error", "ends", "left"),
    [
        (Interrupted("Stopped after round 1 of 2."), True, 1),
        (Interrupted("Stopped after round 1 of 2."), False, 0),
        (QuorumError("No device is left to be asked."), True, 0),
    ],
)
def test_only_an_interrupted_run_with_which_its_process_ends_leaves_something_behind_that_computes(
    monkeypatch: pytest.MonkeyPatch, error: FedemuError, ends: bool, left: int
) -> None:
    computing: set[Any] = set()

    async def embed(plan: Any) -> None:
        may = asyncio.Event()
        plan.computing.add(asyncio.create_task(until_it_may_train(plan, may)))
        computing.update(plan.computing)
        if not left:
            asyncio.get_running_loop().call_later(0.01, may.set)

    async def serve(plan: Plan) -> None:
        plan.opened("here")
        raise error

    monkeypatch.setattr(embedded, "abandon_threads", lambda: ends)
    with pytest.raises(type(error)):
        played(monkeypatch, serve, embed)
    assert sum(task.cancelled() for task in computing) == left, "asyncio cancels what is left in the end"


def test_a_run_that_is_complete_leaves_nothing_behind_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    computing: set[Any] = set()

    async def embed(plan: Any) -> None:
        may = asyncio.Event()
        plan.computing.add(asyncio.create_task(until_it_may_train(plan, may)))
        computing.update(plan.computing)
        asyncio.get_running_loop().call_later(0.01, may.set)

    async def serve(plan: Plan) -> str:
        plan.opened("here")
        return "the summary"

    monkeypatch.setattr(embedded, "abandon_threads", lambda: pytest.fail("a thread was left behind"))
    assert played(monkeypatch, serve, embed) == "the summary"
    assert [task.done() for task in computing] == [True]
