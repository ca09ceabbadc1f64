"""A machine arrives at the coordinator: it enrols, takes its lease and fetches what it needs before devices can live.

A machine of processes (``supervisor.py``) and a machine within one process (``embedded.py``) begin like this.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, Never

from fedemu.device.machine.broker import Broker
from fedemu.device.machine.enrolment import Enrolment
from fedemu.device.machine.lease import LeaseFolder, LeaseSearch
from fedemu.device.machine.link import CoordinatorLink
from fedemu.device.machine.observer import MachineObserver
from fedemu.device.pipe import TrainerSetup
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.code.named import load
from fedemu.protocol.host.futures import fail
from fedemu.protocol.messages import Compute, Granted
from fedemu.protocol.sharing.trunk import Trunk
from fedemu.protocol.transport.interface import Network


class Ways(NamedTuple):
    """What an experiment wants of a machine.

    ``environment`` are the variables with which processes that compute must start. ``shares_link`` says that the
    devices share the machine's connection, and ``sleeping`` that they sleep until they are asked.
    """

    environment: Mapping[str, str]
    shares_link: bool
    sleeping: bool


@dataclass(frozen=True)
class ExperimentCode:
    """The functions that know what an experiment says, each as ``module:attribute`` or ``path/to/file.py:attribute``.

    They are named and not passed, because other processes than this one call them. Each takes the experiment's bytes.
    ``behaviours`` returns a function from a device's index to its ``Behaviour``. ``trainer`` also takes the device
    type and returns a ``Trainer``. ``prepare`` decodes the data into this machine's cache and returns their digest.
    ``ways`` returns the ``Ways`` of the experiment.
    """

    behaviours: str
    trainer: str
    prepare: str
    ways: str


@dataclass(frozen=True, kw_only=True)
class MachinePlan:
    """What every machine is told. The experiment itself comes from the coordinator. Times are real seconds.

    ``address`` is the coordinator's, ``count`` the number of devices. ``state`` is the folder for leases, blobs and
    the devices' own states. ``connect_seconds`` bounds the first enrolment, ``lost_seconds`` a later silence.
    ``compute`` finds out how the machine computes, which the coordinator compares; it is called in a thread, because it
    may take seconds. None: nothing is said.
    """

    address: str
    count: int
    state: Path
    code: ExperimentCode
    device_type: Literal["auto", "cpu", "cuda"] = "auto"
    connect_seconds: float = 60.0
    lost_seconds: float = 120.0
    observer: MachineObserver = field(default_factory=MachineObserver)
    compute: Callable[[], Compute | None] = lambda: None


@dataclass(eq=False)
class Arrival:
    """A machine that has its place: the coordinator's grant, the lease's folder, and the experiment and its stream.

    ``trunk`` carries the link, and can carry more. ``store`` holds the blobs of this machine; ``experiment`` and
    ``stream`` are the files of two that stay for the whole run. ``compute`` is what the coordinator was told of how
    this machine computes.
    """

    plan: MachinePlan
    link: CoordinatorLink
    trunk: Trunk
    granted: Granted
    folder: LeaseFolder
    store: BlobStore
    experiment: Path
    stream: Path
    compute: Compute | None
    _failed: asyncio.Future[Never] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), init=False, repr=False
    )

    @property
    def devices(self) -> list[int]:
        """The indices of this machine's devices."""
        return [device for start, stop in self.granted.ranges for device in range(start, stop)]

    @property
    def count(self) -> int:
        """The number of this machine's devices."""
        return sum(stop - start for start, stop in self.granted.ranges)

    @cached_property
    def ways(self) -> Ways:
        """What the experiment wants of this machine."""
        wanted: Ways = load(self.plan.code.ways)(self.experiment.read_bytes())
        return wanted

    def open_broker(self, network: Network, address: str, token: str, stack: AsyncExitStack) -> Broker:
        """The machine's bus at ``address`` of ``network``. It asks the link for blobs. ``stack`` closes it."""
        broker = Broker(network, address, token, self.store, self.plan.observer, want=self.link.want, failed=self.fail)
        stack.callback(broker.close)
        self.link.arrived, self.link.lost, self.link.needed = broker.arrived, broker.lost, broker.needed
        return broker

    def trainer_setup(self, bus: str, token: str, allow_code: tuple[str, ...] | None) -> TrainerSetup:
        """What trainer 0 of this machine needs to know; the others differ in ``number`` only."""
        return TrainerSetup(
            number=0,
            bus=bus,
            token=token,
            trainer=self.plan.code.trainer,
            experiment=str(self.experiment.absolute()),
            device_type=self._device_type,
            allow_code=allow_code,
        )

    @property
    def _device_type(self) -> str:
        """Where trainers compute. What the user left open is what the coordinator was told of this machine.

        A trainer that does not find the GPU, because it has failed since, must not go on with other bits on a
        processor. For an experiment with an environment of its own, which is that of a processor, it stays open.
        """
        if self.plan.device_type != "auto" or self.compute is None or self.ways.environment:
            return self.plan.device_type
        return self.compute.device

    def fail(self, error: BaseException) -> None:
        """End the machine with ``error``. Only the first call counts."""
        fail(self._failed, error)

    async def until_over(self) -> Never:
        """Raise RunOver after the coordinator's Stop, the error of ``fail``, or what ended the link."""
        await self.link.unless_ended(self._failed)
        raise AssertionError("a machine ends with an exception")


async def arrive(plan: MachinePlan, network: Network, host: str, stack: AsyncExitStack) -> Arrival:
    """Enrol ``plan.count`` devices as machine ``host`` and fetch the experiment and its stream.

    ``stack`` closes the lease's folder, then the link, then a lease that was only tried. Raises RefusedError or
    UnreachableError if the coordinator has no place, ConfigurationError if the state folder cannot be used, BlobError
    if a blob does not come, and RunOver if the run ends meanwhile.
    """
    leases = LeaseSearch(plan.state, plan.count)
    stack.callback(leases.close)
    compute = await asyncio.to_thread(plan.compute)
    enrolment = Enrolment(
        plan.address,
        plan.count,
        host,
        compute=compute,
        leases=leases,
        connect_seconds=plan.connect_seconds,
        lost_seconds=plan.lost_seconds,
    )
    loop = asyncio.get_running_loop()
    trunk = Trunk(network, loop)
    trunk.heard = lambda: enrolment.heard(loop.time())
    link = CoordinatorLink(trunk, plan.address, enrolment, plan.observer)
    stack.push(lambda kind, error, traceback: link.close(error))
    granted = await link.enrol()
    plan.observer.placed(sum(stop - start for start, stop in granted.ranges))
    folder = leases.claim(granted)
    stack.callback(folder.close)
    store = BlobStore(folder.blobs)
    link.keep_blobs(store)
    experiment, stream = await asyncio.gather(link.fetch(granted.experiment), link.fetch(granted.partition))
    return Arrival(plan, link, trunk, granted, folder, store, experiment, stream, compute)
