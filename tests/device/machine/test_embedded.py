"""A machine within one process does what a machine of processes does, also over a bad network."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedemu.device.machine import embedded
from fedemu.device.machine.arrival import ExperimentCode
from fedemu.device.machine.embedded import EmbeddedPlan, embed
from fedemu.device.machine.link import CoordinatorLink
from fedemu.device.machine.sleepers import Sleepers
from fedemu.device.pipe import TrainerSetup
from fedemu.protocol.errors import ConfigurationError, DataError
from fedemu.protocol.messages import Bye, Died, Enroll
from fedemu.protocol.transport.link import Faults
from fedemu.protocol.transport.memory import MemoryNetwork


@pytest.fixture
def plan(
    tmp_path: Path, toy_runner: Callable[[TrainerSetup], Any], toy_code: ExperimentCode
) -> Callable[..., EmbeddedPlan]:
    def make(server: Any) -> EmbeddedPlan:
        return EmbeddedPlan(
            network=server.network,
            address=server.address,
            count=server.devices,
            state=tmp_path / "state",
            code=toy_code,
            open_runner=toy_runner,
            connect_seconds=20.0,
        )

    return make


@asynccontextmanager
async def embedding(plan: EmbeddedPlan) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.get_running_loop().create_task(embed(plan))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def expected(device: int, round: int, own: float = 0.0) -> float:
    return (4 * device + 1) + 1000 * device + round + own


async def test_rounds_go_all_the_way_until_stop(memory_coordinator: Any, plan: Any) -> None:
    server = memory_coordinator()
    async with embedding(plan(server)) as task:
        await server.everyone()
        assert await server.hold(1, range(6)) == {d: expected(d, 1) for d in range(6)}
        assert await server.hold(2, (1, 4)) == {d: expected(d, 2, own=expected(d, 1)) for d in (1, 4)}
        server.stop()
        await asyncio.wait_for(task, 60)
    assert len(server.heard_of(Bye)) == 7


async def test_however_many_devices_have_work_at_once_all_of_it_is_done(
    memory_coordinator: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection in memory drops what is too much for it, unless it is told to take more."""

    class Narrow(MemoryNetwork):
        def __init__(self, most_under_way: int = 50) -> None:
            super().__init__(most_under_way=most_under_way)

    monkeypatch.setattr(embedded, "MemoryNetwork", Narrow)
    server = memory_coordinator(devices=60)
    async with embedding(plan(server)):
        await server.everyone()
        assert await server.hold(1, range(60)) == {d: expected(d, 1) for d in range(60)}


async def test_a_planned_crash_is_told_and_begins_a_new_life(memory_coordinator: Any, plan: Any) -> None:
    server = memory_coordinator(devices=4, drops={"1.0": "crash", "1.1": "leave", "1.2": "offline"})
    async with embedding(plan(server)):
        await server.everyone()
        ask = server.give(1, range(4))
        await server.proceed(ask)
        await server.finish(ask, without=(0, 1, 2))
        await server.until(lambda: all(len(server.incarnations[d]) == 2 for d in range(3)), "the next lives")
        assert len(server.incarnations[3]) == 1
        assert [message.device for message in server.heard_of(Died)] == [0]


@pytest.mark.parametrize("cause", ["crash", "leave", "offline"])
async def test_a_single_device_that_drops_out_as_planned_comes_back(
    memory_coordinator: Any, plan: Any, cause: str
) -> None:
    server = memory_coordinator(devices=1, drops={"1.0": cause})
    async with embedding(plan(server)):
        await server.everyone()
        ask = server.give(1, [0])
        await server.proceed(ask)
        await server.until(lambda: len(server.incarnations[0]) == 2, "the next life")
        assert await server.hold(2, [0]) == {0: expected(0, 2)}


async def test_heartbeats_go_on_while_it_trains(memory_coordinator: Any, plan: Any) -> None:
    server = memory_coordinator(devices=2, slow=0.5)
    server.terms.heartbeat_seconds, server.terms.patience = 0.05, 4
    async with embedding(plan(server)):
        await server.everyone()
        await server.hold(1, range(2))
        assert [len(server.incarnations[d]) for d in range(2)] == [1, 1]


async def test_it_tells_as_long_as_its_thread_computes(
    memory_coordinator: Any, plan: Any, toy_runner: Callable[[TrainerSetup], Any]
) -> None:
    training, held = threading.Event(), threading.Event()

    def open_runner(setup: TrainerSetup) -> Any:
        toy = toy_runner(setup)

        def run(*arguments: Any) -> Any:
            training.set()
            assert held.wait(60)
            return toy.run(*arguments)

        return SimpleNamespace(capacity=toy.capacity, run=run)

    server = memory_coordinator(devices=2)
    machine = replace(plan(server), open_runner=open_runner)
    async with embedding(machine):
        await server.everyone()
        await server.proceed(server.give(1, range(2)))
        await server.until(training.is_set, "the training of a device")
        told = len(machine.computing)
        held.set()
        assert told == 1
        await server.finish("1.0.0")
        await server.until(lambda: not machine.computing, "the end of the training")


async def test_it_ends_although_its_thread_still_computes(
    memory_coordinator: Any, plan: Any, toy_runner: Callable[[TrainerSetup], Any]
) -> None:
    training, held, trained = threading.Event(), threading.Event(), threading.Event()

    def run(*arguments: Any) -> list[Any]:
        training.set()
        held.wait(20)
        trained.set()
        return []

    def open_runner(setup: TrainerSetup) -> Any:
        return SimpleNamespace(capacity=toy_runner(setup).capacity, run=run)

    server = memory_coordinator(devices=2)
    machine = replace(plan(server), open_runner=open_runner)
    async with embedding(machine) as task:
        await server.everyone()
        await server.proceed(server.give(1, range(2)))
        await server.until(training.is_set, "the training of a device")
        server.stop()
        await asyncio.wait({task}, timeout=30)
        found = task.done(), trained.is_set(), len(machine.computing)
        held.set()
        assert found == (True, False, 1)


async def test_over_a_network_that_reorders_and_repeats_messages_the_results_are_the_same(
    memory_coordinator: Any, plan: Any
) -> None:
    faults = Faults(delay_seconds=0.002, duplication=0.2, reordering=0.2)
    server = memory_coordinator(network=MemoryNetwork(faults, seed=3))
    server.terms.heartbeat_seconds = 0.1
    async with embedding(plan(server)):
        await server.everyone()
        for round in range(1, 4):
            own = {d: server.results[f"{round - 1}.0.0"].get(d, 0.0) for d in range(6)}
            assert await server.hold(round, range(6)) == {d: expected(d, round, own[d]) for d in range(6)}


async def test_a_second_life_has_the_lease_and_the_states_of_the_first(memory_coordinator: Any, plan: Any) -> None:
    server = memory_coordinator(devices=2)
    async with embedding(plan(server)):
        await server.everyone()
        await server.hold(1, range(2))
    server.forget_everyone()
    async with embedding(plan(server)):
        await server.everyone()
        assert await server.hold(2, range(2)) == {d: expected(d, 2, own=expected(d, 1)) for d in range(2)}
    assert [message.lease for message in server.heard_of(Enroll)] == [None, "lease-1"]


async def test_what_keeps_it_from_working_is_raised(memory_coordinator: Any, plan: Any) -> None:
    for experiment, error in (
        ({"data": "c" * 64}, DataError),
        ({"broken_behaviours": True}, ConfigurationError),
        ({"unusable_trainer": True}, ConfigurationError),
    ):
        server = memory_coordinator(**experiment)
        with pytest.raises(error):
            await asyncio.wait_for(embed(plan(server)), 5)


async def test_devices_that_are_asked_before_their_process_can_hear_wake_when_it_does() -> None:
    roused: list[tuple[int, int]] = []
    hears = False

    def rouse(number: int, lives: list[tuple[int, int]]) -> bool:
        roused.extend(lives if hears else ())
        return hears

    link = CoordinatorLink(MemoryNetwork(), "nowhere", None, None)  # type: ignore[arg-type]
    here, broker = SimpleNamespace(link=link), SimpleNamespace(rouse=rouse)
    link._wake([2])
    embedded._let_sleep(here, broker, Sleepers([(0, 4)], 0))  # type: ignore[arg-type]
    link._wake([3])
    assert roused == []
    hears = True
    broker.attached(0)
    link._wake([2, 1])
    assert [device for device, _ in roused] == [2, 3, 1]
