"""The supervisor of a machine: enrols, prepares, starts the zygote and the trainers, and sees everything to its end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Never

from fedemu.device.bus import abstract_address
from fedemu.device.machine.broker import Broker
from fedemu.device.machine.enrolment import Enrolment
from fedemu.device.machine.fleet import Fleet
from fedemu.device.machine.lease import claim_lease, find_leases
from fedemu.device.machine.limits import prepare_machine
from fedemu.device.machine.link import CoordinatorLink, RunOver
from fedemu.device.machine.observer import MachineObserver, Silent
from fedemu.device.machine.prepare import prepare_data
from fedemu.device.machine.trainers import Trainers, default_trainers
from fedemu.device.pipe import Setup, TrainerSetup
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.errors import FedemuError, Interrupted
from fedemu.protocol.transport.zeromq import ZmqNetwork

__all__ = ["MachineObserver", "Silent", "SupervisorPlan", "supervise"]

log = logging.getLogger(__name__)

FAREWELL_SECONDS = 3.0


@dataclass(frozen=True)
class SupervisorPlan:
    """What a supervisor is told; the experiment comes from the coordinator. Times are real seconds.

    ``state`` is the folder for leases, blobs and the devices' own states. ``trainers = 0`` means one per core or GPU.
    ``behaviours``, ``trainer`` and ``prepare`` name what is called with the experiment's bytes in other processes.
    """

    address: str
    count: int
    state: Path
    trainers: int = 0
    per_process: int = 1
    device_type: Literal["auto", "cpu", "cuda"] = "auto"
    connect_seconds: float = 60.0
    lost_seconds: float = 120.0
    logs: Path | None = None
    behaviours: str = "fedemu.ops.assembly.behaviours:open_behaviours"
    trainer: str = "fedemu.ops.assembly.trainer:open_trainer"
    prepare: str = "fedemu.ops.data.corpora:prepare"
    observer: MachineObserver = field(default_factory=Silent)


async def supervise(plan: SupervisorPlan) -> None:
    """Run a machine's devices until the coordinator says Stop; nothing is left behind, however it ends.

    Raises ConfigurationError, RefusedError or UnreachableError with one sentence to show, Interrupted after SIGINT or
    SIGTERM (only heeded in the main thread).
    """
    trainers = plan.trainers or default_trainers(plan.device_type)
    prepare_machine(plan.count, plan.per_process, trainers)
    work = asyncio.current_task()
    assert work is not None
    with _signals(work) as signalled:
        try:
            async with AsyncExitStack() as stack:
                await Supervision(plan, trainers, stack).run()
        except RunOver as over:
            log.info("the run is over: %s", over)
        except asyncio.CancelledError:
            if not signalled:
                raise
            work.uncancel()
            raise Interrupted(f"The devices were stopped by {signalled[0]}.") from None


class Supervision:
    """One life of a supervisor. What has to be undone goes on ``stack``, in the order in which it came to be."""

    def __init__(self, plan: SupervisorPlan, trainers: int, stack: AsyncExitStack) -> None:
        self._plan = plan
        self._trainer_count = trainers
        self._stack = stack
        self._failed: asyncio.Future[Never] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        plan, stack = self._plan, self._stack
        if plan.logs is not None:
            plan.logs.mkdir(parents=True, exist_ok=True)
        network = ZmqNetwork(max_sockets=4096)
        stack.callback(network.close)
        leases = find_leases(plan.state, plan.count)
        for lease in leases:
            stack.callback(lease.close)
        enrolment = Enrolment(
            plan.address,
            plan.count,
            socket.gethostname()[:256],
            leases=[lease.record.lease for lease in leases],
            connect_seconds=plan.connect_seconds,
            lost_seconds=plan.lost_seconds,
        )
        link = CoordinatorLink(network, plan.address, enrolment)
        stack.callback(link.close)
        granted = await link.enrol()
        folder = claim_lease(leases, plan.state, granted, plan.count)
        stack.callback(folder.close)
        store = BlobStore(folder.blobs)
        link.keep_blobs(store)
        experiment, partition = await asyncio.gather(link.fetch(granted.experiment), link.fetch(granted.partition))
        await link.unless_ended(prepare_data(plan.prepare, experiment, granted.data))

        address, token = abstract_address(), secrets.token_hex(16)
        devices = [device for start, stop in granted.ranges for device in range(start, stop)]
        setup = Setup(
            coordinator=plan.address,
            bus=address,
            token=token,
            lease=granted.lease,
            heartbeat_seconds=granted.heartbeat_seconds,
            patience=granted.patience,
            behaviours=plan.behaviours,
            experiment=str(experiment.absolute()),
            partition=str(partition.absolute()),
            devices=str(folder.devices.absolute()),
            logs=str(plan.logs.absolute()) if plan.logs else None,
        )
        trainer_setup = TrainerSetup(
            number=0,
            bus=address,
            token=token,
            trainer=plan.trainer,
            experiment=str(experiment.absolute()),
            device_type=plan.device_type,
        )
        broker = Broker(network, address, token, store, plan.observer, want=link.want, failed=self._fail)
        stack.callback(broker.close)
        link.arrived, link.lost, link.needed = broker.arrived, broker.lost, broker.needed
        trainers = Trainers(
            trainer_setup,
            self._trainer_count,
            ended=broker.trainer_ended,
            restarted=lambda: plan.observer.restarted("trainer"),
            failed=self._fail,
        )
        fleet = Fleet(
            setup,
            devices,
            plan.per_process,
            folder.first_incarnation,
            plan.observer,
            died=link.died,
            process_ended=broker.process_ended,
            failed=self._fail,
        )
        broker.joined, broker.trainer_ready = fleet.joined, trainers.ready
        stack.push_async_callback(trainers.stop)
        trainers.launch()  # they take seconds to import what they need, so they come first
        stack.push_async_callback(fleet.stop, broker.quit_processes, FAREWELL_SECONDS)
        await link.unless_ended(fleet.prepare())
        fleet.launch()
        if len(devices) < plan.count:
            log.warning("%d of %d devices are wanted; the others stay idle", len(devices), plan.count)
        log.info("%d devices in %d processes, %d trainers", len(devices), len(fleet), self._trainer_count)
        await link.unless_ended(self._failed)

    def _fail(self, error: FedemuError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)


@contextmanager
def _signals(work: asyncio.Task[object]) -> Iterator[list[str]]:
    """SIGINT and SIGTERM cancel the work, once; the list then names the signal."""
    received: list[str] = []
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        if not received:
            received.append(number.name)
            work.cancel()

    taken = []
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            try:
                loop.add_signal_handler(number, stop, number)
            except (RuntimeError, ValueError):
                break  # not the main thread: whoever owns it cancels us
            taken.append(number)
        yield received
    finally:
        for number in taken:
            loop.remove_signal_handler(number)
