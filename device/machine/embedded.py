"""A machine within one process: the same devices, bus and trainer as a supervisor has, on the running event loop.

Training runs in a thread, so that heartbeats go on. A planned crash ends a device's life and begins the next one here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Never

from fedemu.device.bus import MOST_ON_BUS, Attach, Finished, Train
from fedemu.device.compute.shell import Runner, TrainerShell
from fedemu.device.machine.arrival import Arrival, MachinePlan, arrive
from fedemu.device.machine.broker import Broker
from fedemu.device.machine.link import RunOver
from fedemu.device.machine.prepare import compare_data
from fedemu.device.machine.processes import BIRTH_STRIDE
from fedemu.device.machine.sleepers import Lives, Sleepers
from fedemu.device.pipe import TrainerSetup
from fedemu.device.process.birth import Birthplace
from fedemu.device.process.process import DeviceProcess
from fedemu.protocol.code.named import load
from fedemu.protocol.host.futures import listen
from fedemu.protocol.transport.interface import Network
from fedemu.protocol.transport.memory import MemoryNetwork

_BUS = "bus"
_TOKEN = "embedded"


@dataclass(frozen=True, kw_only=True)
class EmbeddedPlan(MachinePlan):
    """What an embedded machine is told beyond ``MachinePlan``. The coordinator listens at ``address`` of ``network``.

    ``open_runner`` makes the object that computes. It is called in the training thread. ``computing`` holds a task for
    each thing that this thread has to do or does; it may go on with one when the devices have ended.
    """

    network: Network
    open_runner: Callable[[TrainerSetup], Runner]
    computing: set[asyncio.Task[None]] = field(default_factory=set)


async def embed(plan: EmbeddedPlan) -> None:
    """Run the devices until the coordinator says Stop. Cancel this to end them early.

    Raises ConfigurationError, DataError, RefusedError, UnreachableError or BlobError with one sentence to show, and
    whatever a trainer raises.
    """
    try:
        async with AsyncExitStack() as stack:
            await _run(plan, stack)
    except RunOver:
        return


async def _run(plan: EmbeddedPlan, stack: AsyncExitStack) -> Never:
    here = await arrive(plan, plan.network, "embedded", stack)
    granted, code = here.granted, plan.code
    thread = ThreadPoolExecutor(1, "trainer")
    # Nothing can end what it computes, and while it was waited for, no signal would be heard.
    stack.callback(thread.shutdown, wait=False, cancel_futures=True)
    prepare, content = load(code.prepare), here.experiment.read_bytes()
    found = await asyncio.get_running_loop().run_in_executor(thread, prepare, content)
    compare_data(found, granted.data)

    # It is not the coordinator's network, because that one may be set to lose messages.
    bus = MemoryNetwork(most_under_way=MOST_ON_BUS)
    stack.callback(bus.close)
    broker = here.open_broker(bus, _BUS, _TOKEN, stack)
    setup = here.trainer_setup(_BUS, _TOKEN, None)
    trainer = ThreadTrainer(bus, setup, thread, here.fail, plan.computing)
    birthplace = Birthplace.open(
        lease=granted.lease,
        heartbeat_seconds=granted.heartbeat_seconds,
        patience=granted.patience,
        behaviours=load(code.behaviours),
        experiment=here.experiment,
        stream=here.stream,
        folder=here.folder.devices,
    )
    first = here.folder.first_incarnation
    lives = [] if here.ways.sleeping else [(device, first + BIRTH_STRIDE) for device in here.devices]
    attach = Attach(token=_TOKEN, role="process", number=0)
    if here.ways.sleeping:
        _let_sleep(here, broker, Sleepers(here.granted.ranges, first))
    devices = DeviceProcess(
        asyncio.get_running_loop(),
        plan.network,
        plan.address,
        bus,
        _BUS,
        attach,
        birthplace,
        lives,
        over=lambda code: None,
        crash=here.link.died,
    )
    stack.callback(devices.close)
    stack.callback(devices.quit)
    trainer.open_in_thread(setup, plan.open_runner)
    await here.until_over()


def _let_sleep(here: Arrival, broker: Broker, sleepers: Sleepers) -> None:
    """Wake devices when they are asked, in the one process that there is. Those asked before it attaches wake then."""
    waiting: Lives = []

    def rouse(lives: Lives) -> None:
        waiting.extend(lives)
        if waiting and broker.rouse(0, waiting):
            waiting.clear()

    broker.joined = sleepers.has_joined
    broker.attached = lambda number: rouse([])
    broker.asleep = lambda device, incarnation: rouse(sleepers.asleep(device, incarnation))
    here.link.wake_by(lambda devices: rouse(sleepers.wake(devices)))


class ThreadTrainer(TrainerShell):
    """A trainer that computes in ``thread``. Calls ``failed`` with an exception from there.

    ``computing`` gets a task for each thing that the thread has to do, and loses it when that is done.
    """

    def __init__(
        self,
        network: Network,
        setup: TrainerSetup,
        thread: ThreadPoolExecutor,
        failed: Callable[[BaseException], None],
        computing: set[asyncio.Task[None]],
    ) -> None:
        super().__init__(network, setup)
        self._thread = thread
        self._failed = failed
        self._computing = computing

    def open_in_thread(self, setup: TrainerSetup, open_runner: Callable[[TrainerSetup], Runner]) -> None:
        """Make the runner in the thread, and say Ready on the bus when it is there. Returns at once."""

        async def get_ready() -> None:
            self.take(await asyncio.get_running_loop().run_in_executor(self._thread, open_runner, setup))

        self._start(get_ready())

    def train(self, train: Train, frames: Sequence[memoryview]) -> None:
        """Run a group of jobs in the thread and answer them on the bus. Returns at once."""

        async def compute() -> None:
            assert self.runner is not None, "a group comes after Ready"
            runner, began = self.runner, time.monotonic()
            answers = await asyncio.get_running_loop().run_in_executor(
                self._thread, lambda: list(runner.run(train, frames))
            )
            for answer, payload in answers:
                self.bus.send(answer, payload)
            self.bus.send(Finished(group=train.group, seconds=time.monotonic() - began))

        self._start(compute())

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._computing.add(task)
        task.add_done_callback(self._computing.discard)
        listen(task, self._failed)
