"""A scripted coordinator for machines under test, toys for their processes, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.streams.periods import static
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.machine import processes
from fedemu.device.machine.arrival import ExperimentCode
from fedemu.device.machine.supervisor import SupervisorPlan
from fedemu.device.pipe import TrainerSetup
from fedemu.device.process.birth import Birthplace
from fedemu.ops.bench.fleet.scripted import ScriptedCoordinator, Terms
from fedemu.ops.running.launch import free_address
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.code.named import load
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.codec import Buffer, Envelope
from fedemu.protocol.host.private import private_folder
from fedemu.protocol.ids import digest_of
from fedemu.protocol.messages import (
    Accepted,
    Enroll,
    Hello,
    Message,
    Offer,
    Proceed,
    Refused,
    Result,
    Scheduled,
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
    ways=f"{HERE / 'toys.py'}:ways",
)
DATA = digest_of(b"toy data")


async def _until(condition: Callable[[], Any], what: str, seconds: float = 90.0) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        assert loop.time() < deadline, f"{what} did not happen within {seconds} s"
        await asyncio.sleep(0.005)


@pytest.fixture
def until() -> Callable[..., Coroutine[Any, Any, None]]:
    """``await until(condition, what)``: wait for a condition. The test fails if it takes more than ``seconds``."""
    return _until


def stream_of(devices: int) -> bytes:
    """A stream that brings samples 2d and 2d + 1 to device d at the beginning."""
    offsets, none = np.arange(devices + 1) * 2, np.zeros(devices + 1, np.int64)
    partition = Partition(offsets, np.arange(2 * devices), none, np.empty(0, np.int64))
    return encode_tree(StreamPlan(static(partition, 1)[0]).to_arrays())


@pytest.fixture
def toy_stream() -> Callable[[int], bytes]:
    """``toy_stream(devices)``: the blob of a stream for this number of devices."""
    return stream_of


@pytest.fixture
def toy_birthplace(tmp_path: Path) -> Callable[[int], Birthplace]:
    """``toy_birthplace(devices)``: what this number of devices begin with, whose behaviour is that of the toys."""

    def make(devices: int) -> Birthplace:
        (tmp_path / "experiment").write_bytes(b"{}")
        (tmp_path / "stream").write_bytes(stream_of(devices))
        return Birthplace.open(
            lease="lease",
            heartbeat_seconds=60.0,
            patience=5,
            behaviours=load(TOY_CODE.behaviours),
            experiment=tmp_path / "experiment",
            stream=tmp_path / "stream",
            folder=tmp_path / "devices",
        )

    return make


@pytest.fixture
def toy_work() -> Work:
    """The Work of the first ask, which needs no blob."""
    return Work(
        ask="1.0.0",
        program="train",
        task=0,
        start=0.0,
        shared=(),
        state=None,
        download_bytes=1,
        upload_bytes=1,
        passes=1.0,
        deadline=1e6,
        durable_round=0,
    )


class Coordinator(ScriptedCoordinator):
    """A coordinator that plays the asks that the test opens, and remembers every message."""

    def __init__(self, folder: Path, devices: int, experiment: dict[str, Any], network: Network) -> None:
        terms = Terms(range(devices), DATA, heartbeat_seconds=0.5, patience=4, run="toy-run")
        super().__init__(network, folder / "coordinator", terms, json.dumps(experiment).encode(), stream_of(devices))
        self.devices = devices
        self.incarnations: dict[int, list[int]] = defaultdict(list)
        self.log: list[tuple[bytes, Any]] = []
        self.results: dict[str, dict[int, float]] = defaultdict(dict)
        self.groups: dict[str, dict[int, float]] = defaultdict(dict)
        self.scheduled: dict[str, dict[int, Scheduled]] = defaultdict(dict)
        self.states: dict[int, str] = {}
        self.works: dict[str, dict[int, Work]] = defaultdict(dict)
        self.proceeding: dict[str, set[int]] = defaultdict(set)
        self.refusals: list[str] = []

    def forget_everyone(self) -> None:
        """Forget all peers, as if the coordinator had started again."""
        self.members.clear()
        self.supervisor = None

    def heard_of(self, kind: type) -> list[Any]:
        """The messages of one kind, in order."""
        return [message for _, message in self.log if isinstance(message, kind)]

    def receive(self, peer: bytes, envelope: Envelope) -> None:
        self.log.append((peer, envelope.message))
        super().receive(peer, envelope)

    def heard(self, peer: bytes, device: int | None, message: Message, frames: Sequence[Buffer]) -> None:
        if device is None:
            return
        match message:
            case Scheduled():
                self.scheduled[message.ask][device] = message
            case Result():
                (value,) = np.frombuffer(frames[0], np.float64)
                assert self.results[message.ask].setdefault(device, value) == value, "two results of one contribution"
                self.groups[message.ask][device] = message.metrics["group"]
                self.states[device] = message.ask
                self.router.send(peer, Accepted(ask=message.ask))

    def enroll(self, peer: bytes, enroll: Enroll) -> None:
        if self.refusals:
            self.router.send(peer, Refused(reason=self.refusals.pop(0), detail="No."))
        elif enroll.lease not in (None, self.terms.lease):
            self.router.send(peer, Refused(reason="lease_unknown", detail="Not of this run."))
        else:
            super().enroll(peer, enroll)

    def welcome(self, peer: bytes, hello: Hello) -> None:
        assert hello.lease == self.terms.lease
        lives = self.incarnations[hello.device]
        assert not lives or hello.incarnation > lives[-1], "incarnations go up"
        lives.append(hello.incarnation)
        super().welcome(peer, hello)
        for ask, works in self.works.items():
            plan = self.scheduled[ask].get(hello.device)
            dropped = plan is not None and plan.event == "drop"
            if hello.device in works and hello.device not in self.results[ask] and not dropped:
                self.router.send(peer, works[hello.device])
                if hello.device in self.proceeding[ask]:
                    self.router.send(peer, Proceed(ask=ask))

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        await _until(condition, what)

    async def everyone(self, seconds: float = 90.0) -> None:
        """Wait until every device is a member."""
        await _until(lambda: len(self.members) == self.devices, "the whole fleet", seconds)

    def give(self, round: int, devices: Iterable[int], weight: float = 0.0) -> str:
        """Open an ask for these devices. Returns its name."""
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
        """Wait for the schedules, then tell every device to proceed."""
        works = self.works[ask]
        await _until(lambda: self.scheduled[ask].keys() == works.keys(), f"the schedules of {ask}")
        self.proceeding[ask] = set(works)
        for device in works:
            if device in self.members:
                self.router.send(self.members[device], Proceed(ask=ask))

    async def finish(self, ask: str, without: Iterable[int] = ()) -> dict[int, float]:
        """Wait for the results of all devices of an ask except ``without``. Returns the results by device."""
        wanted = self.works[ask].keys() - set(without)
        await _until(lambda: self.results[ask].keys() >= wanted, f"the results of {ask}")
        return self.results[ask]

    async def hold(self, round: int, devices: Iterable[int], weight: float = 0.0) -> dict[int, float]:
        """Play one ask from its beginning to its end."""
        ask = self.give(round, devices, weight)
        await self.proceed(ask)
        return await self.finish(ask)


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[Callable[..., Coordinator]]:
    """Makes coordinators that listen on a free port of this machine."""
    made: list[Coordinator] = []

    def make(devices: int = 6, open: bool = True, **experiment: Any) -> Coordinator:
        made.append(Coordinator(tmp_path, devices, experiment, ZmqNetwork()))
        if open:
            made[-1].open("tcp://127.0.0.1:*")
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
async def memory_coordinator(tmp_path: Path) -> AsyncIterator[Callable[..., Coordinator]]:
    """Makes coordinators on networks in memory."""
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
    """The function that opens the toy trainer's runner."""
    open_runner: Callable[[TrainerSetup], Any] = load(f"{HERE / 'toy_trainer.py'}:open_runner")
    return open_runner


@pytest.fixture
def toy_code() -> ExperimentCode:
    """The functions of toys.py and toy_trainer.py in place of those of an experiment."""
    return TOY_CODE


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., SupervisorPlan]:
    """Makes plans of supervisors whose processes call the toy functions."""

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
def family() -> Callable[[], list[psutil.Process]]:
    """Lists the processes that tests have started and that still live, apart from the one that starts others warm."""

    def listed() -> list[psutil.Process]:
        children = [child for child in psutil.Process().children() if child.name() != "fedemu-warm"]
        return [process for child in children for process in (child, *child.children(recursive=True))]

    return listed


class WarmChildren:
    """Starts zygotes, toy trainers and processes that prepare data in place of interpreters (``warm_children.py``)."""

    WHAT: Mapping[tuple[str, ...], str] = {
        processes.COMMAND: "zygote",
        ("-m", "fedemu.device.machine.prepare"): "prepare",
        (str(HERE / "toy_trainer.py"),): "toy trainers",
    }
    """What the first arguments of an interpreter make of it."""

    def __init__(self) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [*interpreter(), str(HERE / "warm_children.py"), str(theirs.fileno()), str(os.getpid())]
            self._maker = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], env=os.environ | processes.ZYGOTE_ENVIRONMENT, process_group=0
            )

    def close(self) -> None:
        self._line.close()
        self._maker.wait()

    @contextmanager
    def instead(self) -> Iterator[None]:
        """``subprocess`` and asyncio start such a process wherever they would start an interpreter for it."""
        ordinary = subprocess.Popen._execute_child  # type: ignore[attr-defined]

        def execute(popen: Any, args: Any, *rest: Any) -> None:
            _, _, _, kept, _, environment, _, _, shell, *pipes = rest[:15]
            beginning, words = interpreter(), [*args] if isinstance(args, (list, tuple)) else []
            given = words[len(beginning) :] if words[: len(beginning)] == beginning else []
            first = next((first for first in self.WHAT if tuple(given[: len(first)]) == first), None)
            if first is None or shell:
                ordinary(popen, args, *rest)
                return
            ends = {number: number if end == -1 else end for number, end in enumerate(pipes[i] for i in (0, 3, 5))}
            places = ends | {descriptor: descriptor for descriptor in kept}
            request = {
                "what": self.WHAT[first],
                "words": given[len(first) :],
                "environment": dict(os.environ if environment is None else environment),
                "folder": os.getcwd(),
                "group": rest[-1],
                "targets": [*places],
            }
            socket.send_fds(self._line, [json.dumps(request).encode()], [*places.values()])
            if (pid := int(self._line.recv(64))) < 0:  # the system makes no child for another process
                ordinary(popen, args, *rest)
                return
            popen.pid, popen._child_created = pid, True
            popen._close_pipe_fds(*pipes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess.Popen, "_execute_child", execute)
            yield


@pytest.fixture(scope="session")
def _warm_children() -> Iterator[WarmChildren | None]:
    """None where it is not known how the kernel makes a child for another process."""
    if not (sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64")):
        yield None
        return
    made = WarmChildren()
    yield made
    made.close()


@pytest.fixture
def started_warm(_warm_children: WarmChildren | None) -> Iterator[None]:
    """The processes of a machine start without an interpreter and its imports."""
    with nullcontext() if _warm_children is None else _warm_children.instead():
        yield


@pytest.fixture
def leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: Callable[[], list[psutil.Process]],
    started_warm: None,
) -> Iterator[None]:
    """Puts toy trainers in place of real ones. At the end no child and no folder of a bus may be left."""
    folders: list[Path] = []

    @contextmanager
    def noted() -> Iterator[Path]:
        with private_folder() as folder:
            folders.append(folder)
            yield folder

    monkeypatch.setattr("fedemu.device.machine.trainers.COMMAND", (str(HERE / "toy_trainer.py"),))
    monkeypatch.setattr("fedemu.device.machine.supervisor.private_folder", noted)
    (tmp_path / "logs").mkdir()
    before = {process.pid for process in family()}
    yield
    left = [process for process in family() if process.pid not in before]
    assert left == []
    assert [folder for folder in folders if folder.exists()] == []


@pytest.fixture
def free_port() -> int:
    """A port of this machine at which nobody listens, and which the system gives to nobody who asks for any port."""
    return int(free_address().rpartition(":")[2])


_MAIN = """
import asyncio, json, sys
from pathlib import Path
from fedemu.device.machine import trainers
from fedemu.device.machine import processes
from fedemu.device.machine.arrival import ExperimentCode
from fedemu.device.machine.supervisor import SupervisorPlan, supervise
from fedemu.protocol.errors import FedemuError
fields = json.loads(sys.argv[1])
trainers.COMMAND = (fields.pop("command"),)
fields |= {k: Path(fields[k]) for k in ("state", "logs")} | {"code": ExperimentCode(**fields["code"]), "allow_code": ()}
try:
    asyncio.run(supervise(SupervisorPlan(**fields)))
except FedemuError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@pytest.fixture
def separate() -> Iterator[Callable[[SupervisorPlan], psutil.Popen]]:
    """Starts supervisors, each as a process of its own."""
    started: list[psutil.Popen] = []

    def start(plan: SupervisorPlan) -> psutil.Popen:
        functions = ("observer", "shown", "compute", "called")
        fields = {name: value for name, value in plan.__dict__.items() if name not in functions}
        fields |= {"state": str(plan.state), "logs": str(plan.logs), "code": asdict(plan.code)}
        fields |= {"command": str(HERE / "toy_trainer.py")}
        started.append(psutil.Popen([sys.executable, "-c", _MAIN, json.dumps(fields)], start_new_session=True))
        return started[-1]

    yield start
    for process in started:
        if process.is_running():
            process.kill()
        process.wait(5)
