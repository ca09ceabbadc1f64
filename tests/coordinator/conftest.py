"""A scripted fleet over any network, a small algorithm, and the plan of a run on them."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Ask, Context, Forest, ServerJob, Tree, weighted_mean
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run import Run, read_run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.serve import serve
from fedemu.coordinator.settings import Settings
from fedemu.protocol import messages as wire
from fedemu.protocol.blobs.tree_file import decode_tree
from fedemu.protocol.codec import DOWN, Envelope
from fedemu.protocol.ids import DeviceId, Digest, digest_of
from fedemu.protocol.tensors import pack, unpack
from fedemu.protocol.transport.memory import MemoryNetwork

BEAT = 0.05
"""Real seconds from one heartbeat of the fleet to the next."""
FOREVER = wire.Presence(until=float("inf"), intervals=((0.0, float("inf")),))


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Waits for a condition of the fleet or the run; fails after a minute."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - any condition
                await asyncio.sleep(0.002)

    return wait


@pytest.fixture
def calls_in() -> Callable[[Callable[[], object]], int]:
    """Counts the functions that an action calls: a measure of its costs that no other process disturbs."""

    def count(action: Callable[[], object]) -> int:
        calls = Counter[str]()
        sys.setprofile(lambda frame, event, argument: calls.update([event]))
        try:
            action()
        finally:
            sys.setprofile(None)
        return calls["call"] + calls["c_call"]

    return count


@dataclass(frozen=True)
class MeanState:
    model: Tree


class Train:
    """The program of the fake devices. Only what it declares matters here."""

    stages = ()
    noise: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    passes = 2.0
    declares_label_counts = False

    def learning_rate(self, round: int, task: int) -> float:
        return 0.1

    def initial_own(self, shared: Forest) -> Tree:
        return {"own": torch.zeros(1)}

    def payload(self, shared: Forest) -> Forest:
        return {"model": shared["model"]}

    def begin(self, *arguments: Any) -> Any:
        raise NotImplementedError

    finish = begin


class Mean:
    """The mean of the devices' models. In round r, a device adds r × (index + 1) / 8 to the model."""

    programs: Mapping[str, Any] = MappingProxyType({"train": Train()})

    def __init__(self, asks: int = 1, cohort: Any = "selected", job: ServerJob | None = None, devices: int = 6) -> None:
        self.asks, self.cohort, self.job, self.devices = asks, cohort, job, devices
        self.carries: list[Tree] = []

    def init(self, variables: Tree, context: Context) -> MeanState:
        return MeanState(dict(variables))

    def round(self, state: MeanState, context: Context) -> Generator[Ask | ServerJob, Any, MeanState]:
        model = state.model
        for place in range(self.asks):
            if self.job is not None:
                self.carries.append((yield self.job))
            each = {DeviceId(index): {"own": torch.full((2,), float(index))} for index in range(self.devices)}
            reply = yield Ask("train", {"model": model}, {"model": weighted_mean}, self.cohort, each if place else None)
            model = reply.values["model"]
        return MeanState(model)

    def variables(self, state: MeanState) -> Tree:
        return state.model


class Judge:
    """An evaluator whose accuracy and loss follow simply from the model's first value."""

    chance: float | None = 0.5
    periods = 1

    def evaluate(self, variables: Tree, period: int | None = None, on_all: bool = True) -> Evaluation:
        value = float(variables["w"][0])
        return Evaluation(value / 100, value, (value / 100, 0.5), (value, 1.0))


@dataclass(frozen=True)
class Act:
    """What a device does with its Work: it finishes after ``after`` seconds with a ``reply``, or drops out."""

    after: float = 10.0
    event: str = "finish"
    cause: str | None = None
    back: float | None = None
    reply: str = "good"
    """One of good, idle (without samples), nan, misshapen, failed, own_state, declined and silent."""


Script = Callable[[int, wire.Work], Mapping[str, Any]]
"""Maps a device's index and its Work to fields of an Act."""


class FakeDevice:
    """A device that follows the protocol. A script makes its choices."""

    def __init__(self, fleet: FakeFleet, index: int, lease: str) -> None:
        self.fleet, self.index, self.lease = fleet, index, lease
        self.incarnation = 0
        self.welcomed = False
        self.gone = False
        self.works: dict[str, wire.Work] = {}
        self.parts: dict[str, dict[str, Any]] = {}
        self.proceeding: set[str] = set()
        self.results: dict[str, tuple[wire.Result, Sequence[Any]]] = {}
        self.answers: list[wire.Message] = []
        self.verdicts: dict[str, str] = {}
        self.connect()

    def connect(self) -> None:
        network, address = self.fleet.network, self.fleet.address
        self.incarnation += 1
        self.welcomed = False
        self.dealer = network.connect(address, DOWN, self._received, lambda error: None)
        self.hello()

    def hello(self) -> None:
        self.dealer.send(wire.Hello(device=self.index, incarnation=self.incarnation, lease=self.lease))

    def crash(self, *, told: bool = True) -> None:
        """Lose everything and start again. With ``told``, the supervisor tells the coordinator."""
        self.dealer.close()
        if told:
            self.fleet.supervisor.send(wire.Died(device=self.index, incarnation=self.incarnation))
        self.works.clear()
        self.proceeding.clear()
        self.results.clear()
        self.connect()

    def vanish(self) -> None:
        """Go away for good."""
        self.dealer.close()
        self.gone = True

    def tick(self) -> None:
        if self.gone:
            return
        if not self.welcomed:
            self.hello()
            return
        self.dealer.send(wire.Heartbeat())
        for message, frames in self.results.values():
            self.dealer.send(message, frames)

    def _received(self, envelope: Envelope) -> None:
        message = envelope.message
        match message:
            case wire.Welcome():
                self.welcomed = True
                self.proceeding.clear()  # a coordinator that was restarted may ask the same again
                self.dealer.send(self.fleet.presence(self.index, message.horizon))
            case wire.Refused(reason="unknown_peer") if self.welcomed:
                self.incarnation += 1
                self.welcomed = False
                self.hello()
            case wire.Extend():
                self.fleet.since = message.since
                self.dealer.send(self.fleet.presence(self.index, message.until))
            case wire.Work():
                self.works[message.ask] = message
                self.parts[message.ask] = unpack(message.tensors, envelope.frames)
                self._schedule(message)
            case wire.Proceed() if message.ask in self.works:
                self._proceed(self.works[message.ask])
            case wire.Accepted() | wire.Late() | wire.Cancel() | wire.Invalid():
                self._settle(message, message.type)
            case wire.Duplicate():
                self._settle(message, message.verdict)
            case wire.Stop():
                self.fleet.stopped.add(self.index)
                self.dealer.send(wire.Bye())

    def _settle(self, message: Any, verdict: str) -> None:
        self.answers.append(message)
        self.results.pop(message.ask, None)
        self.verdicts.setdefault(message.ask, verdict)

    def _schedule(self, work: wire.Work) -> None:
        act = Act(**self.fleet.script(self.index, work))
        if self.fleet.wall:
            self._proceed(work)
            return
        if act.reply == "declined":
            self.dealer.send(wire.Declined(ask=work.ask, reason="declined", epoch=work.epoch))
            return
        back = None if act.back is None else work.start + act.back
        self.dealer.send(
            wire.Scheduled(
                ask=work.ask,
                event=act.event,  # type: ignore[arg-type]
                at=work.start + act.after,
                cause=act.cause,  # type: ignore[arg-type]
                back=back,
                epoch=work.epoch,
            )
        )

    def _proceed(self, work: wire.Work) -> None:
        act = Act(**self.fleet.script(self.index, work))
        if act.event == "drop":
            if act.cause == "crash":
                self.crash()
            return
        if work.ask not in self.proceeding and act.reply != "silent":
            self.proceeding.add(work.ask)
            self.fleet.with_blobs(work, lambda trees: self._train(work, act, trees))

    def _train(self, work: wire.Work, act: Act, trees: dict[str, dict[str, Any]]) -> None:
        if work.ask not in self.works:
            return
        self.fleet.trained.append((self.index, work.ask))
        if act.reply in ("failed", "own_state"):
            reason = "training" if act.reply == "failed" else act.reply
            self.proceeding.discard(work.ask)  # the message may be lost, so it is sent again on request
            self.dealer.send(
                wire.Failed(ask=work.ask, reason=reason, detail="the loss is not finite", epoch=work.epoch)
            )
            return
        step = np.float32((self.index + 1) / 8 * int(work.ask.split(".")[0]))
        arrays = {f"model/{name}": array + step for name, array in trees["model"].items()}
        if act.reply == "nan":
            arrays["model/w"][0] = np.nan
        if act.reply == "misshapen":
            arrays["model/w"] = arrays["model/w"][:1]
        specs, frames = pack(arrays)
        result = wire.Result(
            ask=work.ask,
            examples=0 if act.reply == "idle" else 1 + self.index % 3,
            steps=4,
            metrics={"loss": float(self.index)},
            seconds=None if self.fleet.seconds is None else self.fleet.seconds * (1 + self.index),
            epoch=work.epoch,
            tensors=specs,
        )
        self.results[work.ask] = result, frames
        self.dealer.send(result, frames)


@dataclass
class FakeFleet:
    """A supervisor and its devices on one network."""

    network: Any
    address: str
    count: int
    script: Script = lambda index, work: {"after": 10.0 + index}
    presence: Callable[[int, float], wire.Presence] = lambda index, until: FOREVER
    wall: bool = False
    seconds: float | None = 0.5
    """The seconds that device 0 tells for a reply. Device 1 tells twice as many, device 2 three times, and so on."""
    lease: str | None = None
    devices: dict[int, FakeDevice] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    since: float = 0.0
    """What the last ``extend`` told of the time."""
    trained: list[tuple[int, str]] = field(default_factory=list)
    refused: list[wire.Refused] = field(default_factory=list)
    granted: wire.Granted | None = None

    def start(self) -> None:
        self._waiting: list[tuple[wire.Work, Callable[[dict[str, dict[str, Any]]], None]]] = []
        self._partial: dict[str, bytearray] = {}
        self.supervisor = self.network.connect(self.address, DOWN, self._received, lambda error: None)
        self._enroll()
        self._task = asyncio.get_running_loop().create_task(self._tick())

    async def close(self) -> None:
        self._task.cancel()
        for device in self.devices.values():
            device.dealer.close()
        self.supervisor.close()

    def with_blobs(self, work: wire.Work, use: Callable[[dict[str, dict[str, Any]]], None]) -> None:
        self._waiting.append((work, use))
        self._serve()

    def _enroll(self) -> None:
        lease = self.granted.lease if self.granted else self.lease
        self.supervisor.send(wire.Enroll(count=self.count, lease=lease, host="here"))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            if self.granted is None:
                self._enroll()
            else:
                self.supervisor.send(wire.Heartbeat())
            for device in self.devices.values():
                device.tick()
            self._serve()

    def _received(self, envelope: Envelope) -> None:
        message = envelope.message
        match message:
            case wire.Granted():
                first, self.granted = self.granted is None, message
                if first:
                    for start, stop in message.ranges:
                        for index in range(start, stop):
                            self.devices[index] = FakeDevice(self, index, message.lease)
            case wire.Refused(reason="unknown_peer"):
                self._enroll()
            case wire.Refused():
                self.refused.append(message)
            case wire.Offer():
                for ref in message.blobs:
                    self._need(ref)
            case wire.Blob():
                held = self._partial.setdefault(message.digest, bytearray())
                if message.offset != len(held):
                    return  # a copy, to which another question would double all that follow
                held += envelope.frames[0]
                if len(held) == message.size:
                    assert digest_of(held) == message.digest
                    self.blobs[message.digest] = bytes(self._partial.pop(message.digest))
                    self._serve()
                else:
                    self._ask(message.digest, len(held))
            case wire.Stop():
                self.stopped.add(-1)
                self.supervisor.send(wire.Bye())

    def _need(self, ref: wire.BlobRef) -> None:
        if ref.digest not in self.blobs:
            self._ask(ref.digest, len(self._partial.get(ref.digest, b"")))

    def _ask(self, digest: str, offset: int) -> None:
        self.supervisor.send(wire.Need(digest=digest, offset=offset, length=64))

    def _serve(self) -> None:
        still = []
        for work, use in self._waiting:
            missing = [ref for ref in work.shared if ref.digest not in self.blobs]
            for ref in missing:
                self._need(ref)
            if missing:
                still.append((work, use))
            else:
                use({ref.key: decode_tree(self.blobs[ref.digest]) for ref in work.shared})
        self._waiting = still


@pytest.fixture
async def network() -> AsyncIterator[MemoryNetwork]:
    """A network in memory, which is closed after the test."""
    network = MemoryNetwork()
    yield network
    network.close()


@pytest.fixture
def make_plan(network: MemoryNetwork, tmp_path: Path) -> Callable[..., CoordinatorPlan]:
    """Makes plans of 4 rounds with 6 devices and 3 replies wanted. Settings and the script's options go by name."""

    def make(directory: str = "run", **more: Any) -> CoordinatorPlan:
        folder = tmp_path / directory
        folder.mkdir(exist_ok=True)
        (folder / "config.toml").touch()
        known = {name: more.pop(name) for name in list(more) if name in Settings.__dataclass_fields__}
        script = {name: more.pop(name) for name in ("asks", "cohort", "job") if name in more}
        settings = Settings(
            run="test", seed=1, rounds=4, devices=6, per_round=3, heartbeat_seconds=BEAT, patience=1000,
            start_timeout=40.0, give_up=40.0,
        )  # fmt: skip
        plan = CoordinatorPlan(
            address="here",
            network=network,
            settings=(settings := replace(settings, **known)),
            algorithm=Mean(**script, devices=settings.devices),
            variables={"w": torch.zeros(3), "b": torch.ones(1)},
            evaluator=Judge(),
            experiment=b"{}",
            partition=b"\x00" * 8,
            data=Digest("0" * 64),
            data_set=Digest("1" * 64),
            classes=2,
            directory=folder,
        )
        return replace(plan, **more)

    return make


@pytest.fixture
def play() -> Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]:
    """Plays a run to its end and reads what it left. In every row the outcomes add up to the devices selected."""

    async def to_its_end(plan: CoordinatorPlan) -> tuple[Summary, Run]:
        summary = await asyncio.wait_for(serve(plan), 60)
        left = read_run(plan.directory)
        for row in left.rows:
            assert row.selected == sum(row.outcomes.values())
        return summary, left

    return to_its_end


@pytest.fixture
async def make_fleet(network: MemoryNetwork) -> AsyncIterator[Callable[..., FakeFleet]]:
    """Makes and starts fleets, which are closed after the test. ``more`` are fields of FakeFleet."""
    fleets: list[FakeFleet] = []

    def make(count: int = 6, **more: Any) -> FakeFleet:
        fleet = FakeFleet(more.pop("network", network), more.pop("address", "here"), count, **more)
        fleet.start()
        fleets.append(fleet)
        return fleet

    yield make
    for fleet in fleets:
        await fleet.close()
