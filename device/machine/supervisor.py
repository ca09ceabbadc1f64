"""The supervisor of a machine: it enrols, prepares the data, starts the zygote and the trainers, and ends them all."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from fedemu.device.compute.environment import lacking
from fedemu.device.host.limits import allow_files, pack_size, require_room
from fedemu.device.host.processors import default_trainers, likely_trainers, usable_gpus
from fedemu.device.machine.arrival import Arrival, MachinePlan, arrive
from fedemu.device.machine.broker import Broker
from fedemu.device.machine.forkers import ForkingProcess
from fedemu.device.machine.link import RunOver
from fedemu.device.machine.packs import Packs
from fedemu.device.machine.prepare import prepare_data
from fedemu.device.machine.processes import DeviceProcesses, start_zygote
from fedemu.device.machine.shared import share_link
from fedemu.device.machine.sleepers import Sleepers
from fedemu.device.machine.trainers import Trainers, start_nursery
from fedemu.device.pipe import Setup
from fedemu.protocol.errors import Interrupted
from fedemu.protocol.host.futures import listen
from fedemu.protocol.host.hardware import host_name
from fedemu.protocol.host.idleness import Idleness, Stuckness
from fedemu.protocol.host.phases import mark, used
from fedemu.protocol.host.private import private_folder
from fedemu.protocol.host.stopping import hearing_stop
from fedemu.protocol.transport.curve import ClientKeys
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.zeromq import ZmqNetwork

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""The pause between two looks at what the trainers do."""
SPARE_PACKS = 64
"""The number of packs for which a shared connection leaves room where devices sleep."""
FAREWELL_SECONDS = 3.0
"""The time that device processes have at the end to say goodbye to the coordinator."""


async def at_once() -> None:
    """There may be a coordinator already."""


@dataclass(frozen=True, kw_only=True)
class SupervisorPlan(MachinePlan):
    """What a supervisor is told beyond ``MachinePlan``.

    ``trainers = 0`` means one per core or GPU. As many machines on this host as ``beside`` says have the same GPUs, and
    as many trainers. ``per_process`` devices share a process. ``logs`` is the folder for what device processes log;
    None: the standard error output. ``keys`` are those of all connections to the coordinator, None for connections
    without keys. A trainer that starts or has jobs is killed if it uses no processor time for ``idle_seconds``, or if
    it neither gets ready nor answers a job for ``stuck_seconds``; another takes its place, and does its jobs.
    ``allow_code`` are the modules and files that an experiment may name beside what comes with fedemu, if they are the
    coordinator's by their digests. None: any, unchecked, because the experiment is that of the user of this machine.
    """

    trainers: int = 0
    beside: int = 1
    per_process: int = 1
    logs: Path | None = None
    keys: ClientKeys | None = None
    idle_seconds: float = 60.0
    stuck_seconds: float = 1800.0
    allow_code: tuple[str, ...] | None = ()
    shown: Callable[[Callable[[], dict[str, Any]]], None] = lambda facts: None
    """Called once on the event loop, with a function that tells which processes there are and what they do."""
    called: Callable[[], Awaitable[None]] = at_once
    """Waits until there is a coordinator to look for. Meanwhile processes import what they will need."""


async def supervise(plan: SupervisorPlan) -> str:
    """Run a machine's devices until the coordinator says Stop. No process or file of the bus outlives it.

    Returns the coordinator's reason, which is how the run ended.

    Raises ConfigurationError, DataError, RefusedError, UnreachableError or BlobError with one sentence to show, and
    Interrupted after SIGINT, SIGTERM or SIGHUP if it runs in the main thread.
    """
    current = asyncio.current_task()
    assert current is not None
    signalled: list[str] = []

    def stop(name: str) -> None:
        signalled.append(name)
        current.cancel()

    with hearing_stop(stop):
        try:
            async with AsyncExitStack() as stack:
                await Supervision(plan, stack).run()
        except RunOver as over:
            log.info("the run is over: %s", over)
            return str(over)
        except asyncio.CancelledError:
            if not signalled:
                raise
            current.uncancel()
            raise Interrupted(f"The devices were stopped by {signalled[0]}.") from None
    raise AssertionError("a machine ends with an exception")


class Supervision:
    """One life of a supervisor. ``stack`` undoes what it has done, in the reverse order."""

    def __init__(self, plan: SupervisorPlan, stack: AsyncExitStack) -> None:
        self._plan = plan
        self._trainer_count = plan.trainers or likely_trainers(plan.device_type)
        self._stack = stack
        self._bus, self._token = "", secrets.token_hex(16)

    async def run(self) -> Never:
        """Arrive, start all processes, and wait for the end. Raises RunOver or an error, never returns."""
        plan, stack = self._plan, self._stack
        if plan.logs is not None:
            plan.logs.mkdir(parents=True, exist_ok=True)
        self._bus = f"ipc://{stack.enter_context(private_folder())}/bus"
        network = ZmqNetwork(max_sockets=4096, keys=plan.keys, watched=True)
        stack.callback(network.close)
        within = DirectNetwork(asyncio.get_running_loop())
        stack.callback(within.close)
        allow_files(plan.count, plan.per_process, self._trainer_count)  # children inherit it
        # These take seconds to import what trainers and devices need, beside everything else that happens here.
        nursery = await start_nursery(plan.code.trainer)
        stack.push_async_callback(nursery.stop)
        zygote = await start_zygote()
        stack.push_async_callback(zygote.stop)
        await plan.called()
        mark("devices", "wait for the coordinator")
        here = await arrive(plan, network, host_name(), stack)
        link = here.link
        # Arrival has found out how this machine computes, so this takes no time. An experiment with an environment of
        # its own computes on processors.
        device_type = "cpu" if here.ways.environment else plan.device_type
        self._trainer_count = plan.trainers or default_trainers(device_type)
        # Devices that sleep need little. How many will be awake at once only shows.
        pack = pack_size(plan.per_process)
        count, packed = (pack, pack) if here.ways.sleeping else (plan.count, plan.per_process)
        require_room(count, packed, self._trainer_count, plan.keys is not None)
        allow_files(count, packed, self._trainer_count)
        mark("devices", "arrival")
        environment = here.ways.environment
        if lacking(os.environ, environment):  # it was not known before which variables this experiment needs
            await nursery.stop()
            nursery = await start_nursery(plan.code.trainer, environment)
            stack.push_async_callback(nursery.stop)
            await zygote.stop()
            zygote = await start_zygote(environment)
            stack.push_async_callback(zygote.stop)
        if here.ways.shares_link:
            connected = SPARE_PACKS if here.ways.sleeping else -(-here.count // plan.per_process)
            share_link(here, within, f"{self._bus}-link", connected, stack)
        broker = here.open_broker(within, self._bus, self._token, stack)
        trainers = Trainers(
            nursery,
            here.trainer_setup(self._bus, self._token, plan.allow_code),
            self._trainer_count,
            gpus=usable_gpus(device_type),
            beside=plan.beside,
            ended=broker.trainer_ended,
            restarted=lambda: plan.observer.restarted("trainer"),
            failed=here.fail,
        )
        processes = self._processes(here, broker, zygote)
        broker.joined, broker.crashed = processes.joined, link.died

        def placed_again() -> None:
            processes.wanted_again(broker.rouse)
            if not here.ways.shares_link:
                broker.coordinator_reachable()

        link.placed_again = placed_again
        broker.trainer_ready, broker.trainer_faulty = trainers.ready, trainers.faulty
        watching = asyncio.create_task(self._watch(broker, trainers))
        listen(watching, here.fail)
        stack.callback(watching.cancel)
        stack.push_async_callback(trainers.stop)
        stack.push_async_callback(processes.stop, broker.quit_processes, FAREWELL_SECONDS)
        prepared = prepare_data(plan.code.prepare, here.experiment, here.granted.data, plan.allow_code)
        await link.unless_ended(_beside(prepared, processes.prepare()))
        mark("devices", "data check and zygote")
        trainers.launch()
        processes.launch()
        plan.shown(lambda: _facts(processes, trainers, broker))
        devices = here.count
        if devices < plan.count:
            sentence = "the run has places for %d of this machine's %d devices; the others stay idle"
            log.warning(sentence, devices, plan.count)
        log.info("%d devices in %d processes, %d trainers", devices, len(processes), self._trainer_count)

        def cpu() -> dict[str, float]:
            return {"devices": processes.used(), "trainers": used(trainers.pids.values())}

        stack.callback(mark, "devices", "rounds", cpu)
        await here.until_over()

    def _processes(self, here: Arrival, broker: Broker, zygote: ForkingProcess) -> DeviceProcesses:
        """The device processes: those of devices that all live at once, or packs in which devices wake."""
        plan, first = self._plan, here.folder.first_incarnation
        told: dict[str, Any] = {
            "died": here.link.died,
            "process_ended": broker.process_ended,
            "failed": here.fail,
        }
        setup = self._setup(here)
        if not here.ways.sleeping:
            return DeviceProcesses(zygote, setup, here.devices, plan.per_process, first, plan.observer, **told)
        sleepers = Sleepers(here.granted.ranges, first)
        packs = Packs(zygote, setup, sleepers, plan.per_process, first, plan.observer, rouse=broker.rouse, **told)
        broker.asleep, broker.attached = packs.asleep, packs.attached
        here.link.wake_by(packs.wake)
        return packs

    async def _watch(self, broker: Broker, trainers: Trainers) -> None:
        """Kill the trainers that should compute and do not: that stand still, or that finish nothing for very long.

        Those that start are looked at, too, because they compute a first step. A GPU that is stuck may keep its process
        busy, so processor time alone does not tell.
        """
        plan = self._plan
        idleness, stuckness = Idleness(plan.idle_seconds), Stuckness(plan.stuck_seconds)
        while True:
            await asyncio.sleep(min(LOOK_SECONDS, plan.idle_seconds / 4, plan.stuck_seconds / 4))
            pids, now = trainers.pids, time.monotonic()
            starting = trainers.starting
            active = {number: pids[number] for number in {*starting, *broker.busy} if number in pids}
            idle = dict.fromkeys(idleness.look(active, now), (plan.idle_seconds, "used no processor time"))
            stuck = stuckness.look({number: (pid, broker.progress(number)) for number, pid in active.items()}, now)
            for number, (seconds, lacked) in (
                dict.fromkeys(stuck, (plan.stuck_seconds, "finished nothing")) | idle
            ).items():
                work = "its start" if number in starting else broker.work_of(number)
                log.error("trainer %d %s for %g s; it is killed. Done again: %s", number, lacked, seconds, work)
                plan.observer.hung(number, seconds, lacked, work)
                trainers.hung(number, f"{lacked} for {seconds:g} s")

    def _setup(self, here: Arrival) -> Setup:
        plan, granted, shared = self._plan, here.granted, here.ways.shares_link
        keys = None if shared or plan.keys is None else (plan.keys.public, plan.keys.secret, plan.keys.server)
        return Setup(
            coordinator=f"{self._bus}-link" if shared else plan.address,
            keys=keys,
            shared=shared,
            bus=self._bus,
            token=self._token,
            lease=granted.lease,
            heartbeat_seconds=granted.heartbeat_seconds,
            patience=granted.patience,
            behaviours=plan.code.behaviours,
            allow_code=plan.allow_code,
            experiment=str(here.experiment.absolute()),
            partition=str(here.stream.absolute()),
            devices=str(here.folder.devices.absolute()),
            logs=str(plan.logs.absolute()) if plan.logs else None,
        )


def _facts(processes: DeviceProcesses, trainers: Trainers, broker: Broker) -> dict[str, Any]:
    """The process ids of a machine with the devices of each, and its jobs, in the form of JSON."""
    return {
        "zygote": processes.zygote,
        "devices": processes.placed,
        "trainers": dict(trainers.pids),
        "busy": broker.busy,
        "waiting": broker.waiting,
    }


async def _beside(first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
    """Wait for both, which go on at the same time. An error of ``first`` ends ``second``, and is raised before its."""
    task = asyncio.create_task(second)
    try:
        await first
        await task
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
