"""A whole machine of devices within the running event loop: the same devices, jobs and trainer, without processes.

Training runs in a thread, so that heartbeats go on. A planned crash throws the device's machine away and begins anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.bus import Attach, Finished, Train
from fedemu.device.compute.shell import Runner, TrainerShell
from fedemu.device.machine.broker import Broker
from fedemu.device.machine.enrolment import Enrolment
from fedemu.device.machine.fleet import BIRTH_STRIDE
from fedemu.device.machine.lease import claim_lease, find_leases
from fedemu.device.machine.link import CoordinatorLink, RunOver
from fedemu.device.machine.observer import MachineObserver, Silent
from fedemu.device.machine.prepare import compare_data
from fedemu.device.pipe import TrainerSetup
from fedemu.device.process.birth import Birthplace
from fedemu.device.process.process import DeviceProcess
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.blobs.tree_file import decode_tree
from fedemu.protocol.host.named import load
from fedemu.protocol.transport.interface import Network
from fedemu.protocol.transport.memory import MemoryNetwork

_BUS = "bus"
_TOKEN = "embedded"


@dataclass(frozen=True)
class EmbeddedPlan:
    """What ``SupervisorPlan`` is to a machine of processes. The coordinator listens at ``address`` of ``network``.

    ``open_runner`` makes what computes, in the training thread.
    """

    network: Network
    address: str
    count: int
    state: Path
    open_runner: Callable[[TrainerSetup], Runner]
    device_type: str = "auto"
    connect_seconds: float = 60.0
    lost_seconds: float = 120.0
    behaviours: str = "fedemu.ops.assembly.behaviours:open_behaviours"
    trainer: str = "fedemu.ops.assembly.trainer:open_trainer"
    prepare: str = "fedemu.ops.data.corpora:prepare"
    observer: MachineObserver = field(default_factory=Silent)


async def embed(plan: EmbeddedPlan) -> None:
    """Run the devices until the coordinator says Stop; raises what ``supervise`` does. Cancel it to end them early."""
    try:
        async with AsyncExitStack() as stack:
            await _run(plan, stack)
    except RunOver:
        return


async def _run(plan: EmbeddedPlan, stack: AsyncExitStack) -> None:
    leases = find_leases(plan.state, plan.count)
    for lease in leases:
        stack.callback(lease.close)
    enrolment = Enrolment(
        plan.address,
        plan.count,
        "embedded",
        leases=[lease.record.lease for lease in leases],
        connect_seconds=plan.connect_seconds,
        lost_seconds=plan.lost_seconds,
    )
    link = CoordinatorLink(plan.network, plan.address, enrolment)
    stack.callback(link.close)
    granted = await link.enrol()
    folder = claim_lease(leases, plan.state, granted, plan.count)
    stack.callback(folder.close)
    store = BlobStore(folder.blobs)
    link.keep_blobs(store)
    experiment, partition = await asyncio.gather(link.fetch(granted.experiment), link.fetch(granted.partition))
    loop = asyncio.get_running_loop()
    thread = ThreadPoolExecutor(1, "trainer")
    stack.callback(thread.shutdown, cancel_futures=True)
    content = experiment.read_bytes()
    found = await loop.run_in_executor(thread, load(plan.prepare), content)
    compare_data(found, granted.data)

    failed: asyncio.Future[Never] = loop.create_future()

    def fail(error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    bus = MemoryNetwork()  # of its own, since that to the coordinator may be told to lose messages
    stack.callback(bus.close)
    broker = Broker(bus, _BUS, _TOKEN, store, plan.observer, want=link.want, failed=fail)
    stack.callback(broker.close)
    link.arrived, link.lost, link.needed = broker.arrived, broker.lost, broker.needed
    setup = TrainerSetup(
        number=0,
        bus=_BUS,
        token=_TOKEN,
        trainer=plan.trainer,
        experiment=str(experiment),
        device_type=plan.device_type,
    )
    trainer = ThreadTrainer(bus, setup, thread, fail)
    birthplace = Birthplace(
        lease=granted.lease,
        heartbeat_seconds=granted.heartbeat_seconds,
        patience=granted.patience,
        behaviour=load(plan.behaviours)(content),
        stream=StreamPlan.from_arrays(decode_tree(partition)),
        folder=folder.devices,
    )
    first = folder.first_incarnation + BIRTH_STRIDE
    lives = [(device, first) for start, stop in granted.ranges for device in range(start, stop)]
    attach = Attach(token=_TOKEN, role="process", number=0)
    broker.joined = _count_joined(plan.observer, len(lives))
    devices = DeviceProcess(
        plan.network, plan.address, bus, _BUS, attach, birthplace, lives, over=lambda code: None, crash=link.died
    )
    stack.callback(devices.close)
    stack.callback(devices.quit)
    trainer.open_in_thread(setup, plan.open_runner)
    await link.unless_ended(failed)


def _count_joined(observer: MachineObserver, total: int) -> Callable[[int, int], None]:
    joined: set[int] = set()

    def count(device: int, incarnation: int) -> None:
        joined.add(device)
        observer.devices({"connected": len(joined), "starting": total - len(joined), "stopped": 0})

    return count


class ThreadTrainer(TrainerShell):
    """A trainer whose computing happens in ``thread``; ``failed`` hears of what goes wrong there."""

    def __init__(
        self,
        network: Network,
        setup: TrainerSetup,
        thread: ThreadPoolExecutor,
        failed: Callable[[BaseException], None],
    ) -> None:
        super().__init__(network, setup)
        self._thread = thread
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def open_in_thread(self, setup: TrainerSetup, open_runner: Callable[[TrainerSetup], Runner]) -> None:
        async def get_ready() -> None:
            runner = await asyncio.get_running_loop().run_in_executor(self._thread, open_runner, setup)
            self.open(setup, lambda _: runner)

        self._start(get_ready())

    def train(self, train: Train, frames: Sequence[memoryview]) -> None:
        async def compute() -> None:
            assert self.runner is not None, "work comes after Ready"
            runner, began = self.runner, time.monotonic()
            answers = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: list(runner.run(train, frames))
            )
            for answer, payload in answers:
                self.bus.send(answer, payload)
            self.bus.send(Finished(group=train.group, seconds=time.monotonic() - began))

        self._start(compute())

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)
