"""A scripted coordinator for supervisors under test, and a machine whose every trace is looked for at the end."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.streams.periods import static
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.bus import abstract_address
from fedemu.device.machine.arrival import ExperimentCode
from fedemu.device.machine.supervisor import SupervisorPlan
from fedemu.device.pipe import TrainerSetup
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.codec import UP, Envelope
from fedemu.protocol.errors import BlobError
from fedemu.protocol.host.named import load
from fedemu.protocol.ids import Digest, digest_of
from fedemu.protocol.messages import (
    Accepted,
    Beat,
    Blob,
    BlobRef,
    Bye,
    Enroll,
    Granted,
    Heartbeat,
    Hello,
    Need,
    Offer,
    Proceed,
    Refused,
    Result,
    Scheduled,
    Stop,
    Welcome,
    Work,
)
from fedemu.protocol.transport.interface import Network
from fedemu.protocol.transport.memory import MemoryNetwork
from fedemu.protocol.transport.zeromq import ZmqNetwork

HERE = Path(__file__).parent
TOY_CODE = ExperimentCode(
    behaviours=f"{HERE / 'toys.py'}:open_behaviours",
    trainer=f"{HERE / 'toy_trainer.py'}:open_runner",
    prepare=f"{HERE / 'toys.py'}:prepare",
)
DATA = digest_of(b"toy data")


async def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> None:
    """Wait for a condition; a test fails that waits too long."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"{what} did not happen within {seconds} s"
        await asyncio.sleep(0.005)


class Coordinator:
    """Grants one lease, serves blobs, welcomes devices, and lets the test hold asks."""

    def __init__(self, folder: Path, devices: int, experiment: dict[str, Any], network: Network | None = None) -> None:
        self.network: Network = network or ZmqNetwork()
        self.store = BlobStore(folder / "coordinator")
        self.devices = devices
        self.lease, self.run = "lease-1", "toy-run"
        self.heartbeat_seconds, self.patience = 0.5, 4
        self.experiment = self.blob("experiment", json.dumps(experiment).encode())
        offsets, none = np.arange(devices + 1) * 2, np.zeros(devices + 1, np.int64)
        partition = Partition(offsets, np.arange(2 * devices), none, np.empty(0, np.int64))
        self.partition = self.blob("partition", encode_tree(StreamPlan(static(partition, 1)[0]).to_arrays()))
        self.members: dict[int, bytes] = {}
        self._devices: dict[bytes, int] = {}
        self.incarnations: dict[int, list[int]] = defaultdict(list)
        self.supervisor: bytes | None = None
        self.log: list[tuple[bytes, Any]] = []
        self.results: dict[str, dict[int, float]] = defaultdict(dict)
        self.groups: dict[str, dict[int, float]] = defaultdict(dict)
        self.scheduled: dict[str, dict[int, Scheduled]] = defaultdict(dict)
        self.states: dict[int, str] = {}
        self.works: dict[str, dict[int, Work]] = defaultdict(dict)
        self.proceeding: dict[str, set[int]] = defaultdict(set)
        self.refusals: list[str] = []
        self.address = ""

    def blob(self, key: str, data: bytes) -> BlobRef:
        return BlobRef(key=key, digest=self.store.put(data), size=len(data))

    def open(self, address: str = "tcp://127.0.0.1:*") -> None:
        self.router = self.network.bind(address, UP, self._received, lambda peer, error: None)
        self.address = self.router.address

    def forget_everyone(self) -> None:
        """As if it had been started again."""
        self.members.clear()
        self.supervisor = None

    def heard(self, kind: type) -> list[Any]:
        return [message for _, message in self.log if isinstance(message, kind)]

    def _received(self, peer: bytes, envelope: Envelope) -> None:
        message = envelope.message
        self.log.append((peer, message))
        device = self._devices.get(peer, -1)
        known = self.members.get(device) == peer or peer == self.supervisor
        match message:
            case Enroll():
                self._enroll(peer, message)
            case Hello():
                self._hello(peer, message)
            case _ if not known:
                self.router.send(peer, Refused(reason="unknown_peer", detail="Who are you?"))
            case Heartbeat():
                self.router.send(peer, Beat())
            case Need():
                try:
                    data = self.store.read(Digest(message.digest), message.offset, message.length)
                except BlobError as error:
                    self.router.send(peer, Refused(reason="unknown_blob", detail=str(error)))
                    return
                size = self.store.size(Digest(message.digest))
                self.router.send(peer, Blob(digest=message.digest, offset=message.offset, size=size), [data])
            case Scheduled():
                self.scheduled[message.ask][device] = message
            case Result():
                (value,) = np.frombuffer(envelope.frames[0], np.float64)
                assert self.results[message.ask].setdefault(device, value) == value, "two results of one contribution"
                self.groups[message.ask][device] = message.metrics["group"]
                self.states[device] = message.ask
                self.router.send(peer, Accepted(ask=message.ask))
            case Bye():
                self.members.pop(device, None)

    def _enroll(self, peer: bytes, message: Enroll) -> None:
        if self.refusals:
            self.router.send(peer, Refused(reason=self.refusals.pop(0), detail="No."))
        elif message.lease not in (None, self.lease):
            self.router.send(peer, Refused(reason="lease_unknown", detail="Not of this run."))
        else:
            self.supervisor = peer
            self.router.send(peer, self.grant())

    def grant(self) -> Granted:
        return Granted(
            lease=self.lease,
            run=self.run,
            ranges=((0, self.devices),),
            experiment=self.experiment,
            partition=self.partition,
            data=DATA,
            heartbeat_seconds=self.heartbeat_seconds,
            patience=self.patience,
        )

    def _hello(self, peer: bytes, hello: Hello) -> None:
        assert hello.lease == self.lease
        lives = self.incarnations[hello.device]
        assert not lives or hello.incarnation > lives[-1], "incarnations go up"
        lives.append(hello.incarnation)
        self.members[hello.device] = peer
        self._devices[peer] = hello.device
        welcome = Welcome(
            device=hello.device,
            clock="virtual",
            horizon=1000.0,
            heartbeat_seconds=self.heartbeat_seconds,
            patience=self.patience,
            durable_round=0,
        )
        self.router.send(peer, welcome)
        for ask, works in self.works.items():
            plan = self.scheduled[ask].get(hello.device)
            dropped = plan is not None and plan.event == "drop"
            if hello.device in works and hello.device not in self.results[ask] and not dropped:
                self.router.send(peer, works[hello.device])
                if hello.device in self.proceeding[ask]:
                    self.router.send(peer, Proceed(ask=ask))

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        await until(condition, what)

    async def everyone(self, seconds: float = 30.0) -> None:
        await until(lambda: len(self.members) == self.devices, "the whole fleet", seconds)

    def give(self, round: int, devices: Iterable[int], weight: float = 0.0) -> str:
        """Open an ask for these devices."""
        ask = f"{round}.0.0"
        ref = self.blob("model", encode_tree({"w": np.array([weight])}))
        if self.supervisor is not None:
            self.router.send(self.supervisor, Offer(blobs=(ref,), round=round))
        for device in devices:
            work = Work(
                ask=ask,
                program="train",
                task=0,
                start=100.0 * round,
                shared=(ref,),
                state=self.states.get(device),
                download_bytes=1,
                upload_bytes=1,
                passes=1.0,
                deadline=600.0,
                durable_round=round - 1,
            )
            self.works[ask][device] = work
            if device in self.members:
                self.router.send(self.members[device], work)
        return ask

    async def proceed(self, ask: str) -> None:
        """Wait for the schedules, then let everyone go on."""
        works = self.works[ask]
        await until(lambda: self.scheduled[ask].keys() == works.keys(), f"the schedules of {ask}")
        self.proceeding[ask] = set(works)
        for device in works:
            if device in self.members:
                self.router.send(self.members[device], Proceed(ask=ask))

    async def finish(self, ask: str, without: Iterable[int] = ()) -> dict[int, float]:
        wanted = self.works[ask].keys() - set(without)
        await until(lambda: self.results[ask].keys() >= wanted, f"the results of {ask}")
        return self.results[ask]

    async def hold(self, round: int, devices: Iterable[int], weight: float = 0.0) -> dict[int, float]:
        """One ask from its beginning to its end."""
        ask = self.give(round, devices, weight)
        await self.proceed(ask)
        return await self.finish(ask)

    def stop(self, reason: str = "done") -> None:
        for peer in [*self.members.values(), self.supervisor]:
            if peer is not None:
                self.router.send(peer, Stop(reason=reason))

    def close(self) -> None:
        self.network.close()


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[Callable[..., Coordinator]]:
    """Makes coordinators that listen on a free port of this machine."""
    made: list[Coordinator] = []

    def make(devices: int = 6, open: bool = True, **experiment: Any) -> Coordinator:
        made.append(Coordinator(tmp_path, devices, experiment))
        if open:
            made[-1].open()
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
async def memory_coordinator(tmp_path: Path) -> AsyncIterator[Callable[..., Coordinator]]:
    """Makes coordinators for devices in the same loop."""
    made: list[Coordinator] = []

    def make(devices: int = 6, network: Network | None = None, **experiment: Any) -> Coordinator:
        made.append(Coordinator(tmp_path / str(len(made)), devices, experiment, network or MemoryNetwork()))
        made[-1].open("coordinator")
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def toy_runner() -> Callable[[TrainerSetup], Any]:
    """What the toy trainer process computes with."""
    open_runner: Callable[[TrainerSetup], Any] = load(f"{HERE / 'toy_trainer.py'}:open_runner")
    return open_runner


@pytest.fixture
def toy_code() -> ExperimentCode:
    """The functions of toys.py and toy_trainer.py in place of those of an experiment."""
    return TOY_CODE


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., SupervisorPlan]:
    """Plans of supervisors with toys for everything that an experiment would bring."""

    def make(address: str, count: int = 6, **changes: Any) -> SupervisorPlan:
        fields: dict[str, Any] = {
            "state": tmp_path / "state",
            "code": TOY_CODE,
            "trainers": 1,
            "logs": tmp_path / "logs",
            "connect_seconds": 20.0,
            "lost_seconds": 20.0,
        }
        return SupervisorPlan(address=address, count=count, **(fields | changes))

    return make


@pytest.fixture
def leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Toy trainers in place of real ones; afterwards there is no child, and no socket of the buses that were made."""
    buses: list[str] = []

    def address() -> str:
        buses.append(abstract_address())
        return buses[-1]

    monkeypatch.setattr("fedemu.device.machine.trainers.COMMAND", (str(HERE / "toy_trainer.py"),))
    monkeypatch.setattr("fedemu.device.machine.supervisor.abstract_address", address)
    (tmp_path / "logs").mkdir()
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
    assert left == []
    sockets = Path("/proc/net/unix").read_text()
    assert [bus for bus in buses if bus.removeprefix("ipc://") in sockets] == []


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_MAIN = """
import asyncio, json, sys
from pathlib import Path
from fedemu.device.machine import trainers
from fedemu.device.machine.arrival import ExperimentCode
from fedemu.device.machine.supervisor import SupervisorPlan, supervise
from fedemu.protocol.errors import FedemuError
fields = json.loads(sys.argv[1])
trainers.COMMAND = (fields.pop("command"),)
fields |= {k: Path(fields[k]) for k in ("state", "logs")} | {"code": ExperimentCode(**fields["code"])}
try:
    asyncio.run(supervise(SupervisorPlan(**fields)))
except FedemuError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def separate() -> Iterator[Callable[[SupervisorPlan], psutil.Popen]]:
    """Starts supervisors as processes of their own."""
    started: list[psutil.Popen] = []

    def start(plan: SupervisorPlan) -> psutil.Popen:
        fields = {name: value for name, value in plan.__dict__.items() if name != "observer"}
        fields |= {"state": str(plan.state), "logs": str(plan.logs), "code": asdict(plan.code)}
        fields |= {"command": str(HERE / "toy_trainer.py")}
        started.append(psutil.Popen([sys.executable, "-c", _MAIN, json.dumps(fields)], start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.is_running():
            process.kill()
        process.wait(5)
