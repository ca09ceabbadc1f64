"""How a machine arrives: its place, its files, and what is undone at the end, in which order."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fedemu.device.machine.arrival import ExperimentCode, MachinePlan, Ways, arrive
from fedemu.device.machine.lease import LeaseSearch
from fedemu.device.machine.link import RunOver
from fedemu.device.machine.observer import MachineObserver
from fedemu.ops.bench.fleet.scripted import ScriptedCoordinator
from fedemu.protocol.blobs.fetch import MOST_WAITS
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import UP, Envelope, Packed
from fedemu.protocol.errors import FedemuError, RefusedError
from fedemu.protocol.messages import Bye, Compute, Enroll, Need, Offer, Refused
from fedemu.protocol.transport.memory import MemoryNetwork


@pytest.fixture
def plan(tmp_path: Path, toy_code: ExperimentCode) -> Callable[..., MachinePlan]:
    def make(server: Any, **changes: Any) -> MachinePlan:
        fields = {"address": server.address, "count": server.devices, "state": tmp_path / "state", "code": toy_code}
        return MachinePlan(**(fields | changes))

    return make


async def test_a_machine_that_arrived_has_its_devices_and_its_files(memory_coordinator: Any, plan: Any) -> None:
    server = memory_coordinator(devices=3, slow=0.5)
    async with AsyncExitStack() as stack:
        here = await arrive(plan(server), server.network, "here", stack)
        assert here.devices == [0, 1, 2]
        assert json.loads(here.experiment.read_bytes()) == {"slow": 0.5}
        assert here.stream.parent == here.folder.blobs
        before = here.link._enrolment._heard
        await asyncio.sleep(0)
        here.trunk.heard()
        assert here.link._enrolment._heard > before, "what comes for devices shows that the coordinator lives"
    assert server.heard_of(Enroll) == [Enroll(count=3, host="here")]


GPU = Compute(fedemu="1", torch="2", numpy="2", device="cuda")


def portable(experiment: bytes) -> Ways:
    return Ways({"MKL_CBWR": "COMPATIBLE"}, shares_link=False, sleeping=False)


@pytest.mark.parametrize(
    ("told", "chosen", "ways", "device_type"),
    [
        (GPU, "auto", None, "cuda"),
        (msgspec.structs.replace(GPU, device="cpu"), "auto", None, "cpu"),
        (GPU, "auto", f"{__file__}:portable", "auto"),
        (GPU, "cuda", None, "cuda"),
        (None, "auto", None, "auto"),
    ],
)
async def test_trainers_compute_where_the_coordinator_was_told_and_on_no_processor_if_a_gpu_is_lost(
    told: Compute | None,
    chosen: str,
    ways: str | None,
    device_type: str,
    memory_coordinator: Any,
    plan: Any,
    toy_code: ExperimentCode,
) -> None:
    server = memory_coordinator(devices=3)
    code = toy_code if ways is None else replace(toy_code, ways=ways)
    async with AsyncExitStack() as stack:
        machine = plan(server, device_type=chosen, compute=lambda: told, code=code)
        here = await arrive(machine, server.network, "here", stack)
        assert here.trainer_setup("bus", "token", None).device_type == device_type
    assert server.heard_of(Enroll) == [Enroll(count=3, host="here", compute=told)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"t": "granted", "v": 2}, "the message is of protocol version 2, this side speaks 1"),
        ({"t": "granted", "v": 1, "colour": "red"}, "granted: Object contains unknown field `colour`"),
        ({"t": "refused", "v": 1, "reason": "malformed", "detail": "enroll: no"}, "enroll: no"),
    ],
)
async def test_a_coordinator_of_another_version_is_no_coordinator_that_does_not_answer(
    toy_code: ExperimentCode, tmp_path: Path, answer: dict[str, Any], said: str
) -> None:
    network = MemoryNetwork()

    def received(peer: bytes, envelope: Envelope) -> None:
        router.send(peer, Packed(msgspec.msgpack.encode(answer)))

    router = network.bind("other", UP, received, lambda peer, error: None)
    async with AsyncExitStack() as stack:
        with pytest.raises(RefusedError) as error:
            await arrive(MachinePlan(address="other", count=1, state=tmp_path, code=toy_code), network, "here", stack)
    assert str(error.value) == (
        f"The coordinator at other and this machine do not understand each other ({said}); install the same version of "
        "fedemu on both, which fedemu --version tells."
    )


async def test_the_lease_is_held_until_the_end_and_found_by_the_next_life(
    memory_coordinator: Any, plan: Any, tmp_path: Path, until: Any
) -> None:
    server = memory_coordinator(devices=3)
    async with AsyncExitStack() as stack:
        await arrive(plan(server), server.network, "here", stack)
        assert list(LeaseSearch(tmp_path / "state", 3)) == []
    await until(lambda: server.heard_of(Bye), "the goodbye")
    assert server.heard_of(Bye) == [Bye(reason="stopped")]
    async with AsyncExitStack() as stack:
        again = await arrive(plan(server), server.network, "here", stack)
        assert again.folder.record.life == 2
    assert [enroll.lease for enroll in server.heard_of(Enroll)] == [None, "lease-1"]


class Told(MachineObserver):
    """Remembers what it was told of the machine's place with its coordinator."""

    def __init__(self) -> None:
        self.news: list[str] = []

    def placed(self, devices: int) -> None:
        self.news.append(f"placed {devices}")

    def lost(self, seconds: float) -> None:
        self.news.append("lost")

    def found(self) -> None:
        self.news.append("found")


async def test_a_blob_is_not_given_up_while_the_coordinator_is_away(
    memory_coordinator: Any, plan: Any, monkeypatch: pytest.MonkeyPatch, until: Any
) -> None:
    monkeypatch.setattr("fedemu.protocol.blobs.fetch.PATIENCE", 0.02)
    server, told = memory_coordinator(), Told()
    server.terms.heartbeat_seconds = 0.01
    async with AsyncExitStack() as stack:
        here = await arrive(plan(server, observer=told), server.network, "here", stack)
        server.router.close()
        fetching = asyncio.create_task(here.link.fetch(server.blob("model", b"weights")))
        await asyncio.sleep(2 * MOST_WAITS * 0.02)
        await until(lambda: told.news[-1] == "lost", "the loss of the coordinator")
        assert not fetching.done()
        before = len(told.news)
        server.open("coordinator")
        assert (await asyncio.wait_for(fetching, 60)).read_bytes() == b"weights"
    assert told.news[0] == "placed 6"
    assert told.news[before] == "found"


async def test_a_part_of_a_blob_that_does_not_come_is_asked_for_again(
    memory_coordinator: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.protocol.blobs.fetch.PATIENCE", 0.02)
    server, serve, lost = memory_coordinator(), ScriptedCoordinator._serve, []
    async with AsyncExitStack() as stack:
        here = await arrive(plan(server), server.network, "here", stack)

        def lose_the_first(peer: bytes, need: Need) -> None:
            if lost:
                serve(server, peer, need)
            else:
                lost.append(need)

        monkeypatch.setattr(server, "_serve", lose_the_first)
        fetching = here.link.fetch(server.blob("model", b"weights"))
        assert (await asyncio.wait_for(fetching, 60)).read_bytes() == b"weights"
    assert len(lost) == 1


async def test_a_blob_that_the_coordinator_did_not_have_is_asked_for_at_its_offer(
    memory_coordinator: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, serve = memory_coordinator(), ScriptedCoordinator._serve
    async with AsyncExitStack() as stack:
        here = await arrive(plan(server), server.network, "here", stack)
        ref = server.blob("model", b"weights")

        def refuse_and_offer(peer: bytes, need: Need) -> None:
            monkeypatch.setattr(server, "_serve", lambda peer, need: serve(server, peer, need))
            server.router.send(peer, Refused(reason="unknown_blob", detail="Its ask is over."))
            server.router.send(peer, Offer(blobs=(ref,), round=1))

        monkeypatch.setattr(server, "_serve", refuse_and_offer)
        assert (await asyncio.wait_for(here.link.fetch(ref), 4.0)).read_bytes() == b"weights"


@pytest.mark.parametrize("when", ["message", "timer"])
async def test_a_fault_that_nobody_expects_ends_the_machine_and_not_only_its_timer(
    memory_coordinator: Any, plan: Any, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    server = memory_coordinator()
    server.terms.heartbeat_seconds = 0.01
    async with AsyncExitStack() as stack:
        here = await arrive(plan(server), server.network, "here", stack)

        def fail(*_: object) -> Any:
            raise OSError(errno.EIO, "Input/output error")

        if when == "timer":
            monkeypatch.setattr(here.link._enrolment, "tick", fail)
        else:
            monkeypatch.setattr(BlobStore, "evict", fail)
            server.router.send(server.supervisor, Offer(blobs=(here.granted.experiment,), round=1))
            server.router.send(server.supervisor, Offer(blobs=(), round=3))
        async with asyncio.timeout(60):
            with pytest.raises(OSError, match="Input/output error"):
                await here.until_over()


async def test_a_grant_that_comes_while_the_machine_is_being_stopped_is_no_fault(
    memory_coordinator: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, faults = memory_coordinator(), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    async with AsyncExitStack() as stack:
        arriving = asyncio.create_task(arrive(plan(server), server.network, "here", stack))
        monkeypatch.setattr(server, "enroll", lambda peer, enroll: arriving.cancel() and grant(peer, enroll))
        grant = type(server).enroll.__get__(server)
        await asyncio.wait({arriving})
        assert arriving.cancelled()
        assert server.heard_of(Enroll)
        for _ in range(10):
            await asyncio.sleep(0)
    assert faults == []


async def test_what_came_last_is_undone_first(
    memory_coordinator: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    undone: list[str] = []
    for kind in ("broker.Broker", "link.CoordinatorLink", "lease.LeaseFolder"):
        monkeypatch.setattr(
            f"fedemu.device.machine.{kind}.close", lambda self, error=None: undone.append(type(self).__name__)
        )
    server, bus = memory_coordinator(), MemoryNetwork()
    async with AsyncExitStack() as stack:
        here = await arrive(plan(server), server.network, "here", stack)
        here.open_broker(bus, "bus", "token", stack)
    bus.close()
    assert undone == ["Broker", "LeaseFolder", "CoordinatorLink"]


async def test_a_refusal_ends_it_and_leaves_no_lease(memory_coordinator: Any, plan: Any, tmp_path: Path) -> None:
    server = memory_coordinator()
    server.refusals.append("superseded")
    async with AsyncExitStack() as stack:
        with pytest.raises(RefusedError, match="refused this machine: No"):
            await arrive(plan(server), server.network, "here", stack)
    assert not (tmp_path / "state").exists()


async def test_the_first_failure_is_what_the_machine_ends_with(memory_coordinator: Any, plan: Any) -> None:
    server = memory_coordinator()
    async with AsyncExitStack() as stack:
        here = await arrive(plan(server), server.network, "here", stack)
        here.fail(FedemuError("the first"))
        here.fail(FedemuError("the second"))
        with pytest.raises(FedemuError, match="the first"):
            await here.until_over()


async def test_the_coordinators_stop_ends_it(memory_coordinator: Any, plan: Any) -> None:
    server = memory_coordinator()
    async with AsyncExitStack() as stack:
        here = await arrive(plan(server), server.network, "here", stack)
        server.stop("completed")
        with pytest.raises(RunOver, match="completed"):
            await asyncio.wait_for(here.until_over(), 5)
