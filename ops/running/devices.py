"""Runs the devices of one machine. Only the trainers import torch.

``fedemu device`` does this, and so does the child that ``fedemu run`` starts.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CollectorRegistry

from fedemu.device.machine.observer import MachineObserver, Silent
from fedemu.device.machine.supervisor import SupervisorPlan, supervise
from fedemu.ops.experiment import Runtime
from fedemu.ops.running.device_code import DEVICE_CODE
from fedemu.ops.running.exits import exit_code_of
from fedemu.ops.watching.exporter import Exporter
from fedemu.ops.watching.logs import open_log
from fedemu.ops.watching.metrics import SupervisorMetrics
from fedemu.protocol.errors import ConfigurationError


def supervise_alone(count: int, runtime: Runtime, state: Path | None) -> int:
    """Run devices until the coordinator says that the run is over, as ``fedemu device`` does. Returns the exit code."""
    folder = state if state is not None else state_folder(os.environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(
            f"can't make {folder}: {error.strerror}; choose another folder with --state"
        ) from error
    say(
        f"{counted(count)} for the coordinator at {runtime.connect}; "
        f"they wait {SupervisorPlan.connect_seconds:g} s for it\n"
        f"  process  {os.getpid()}\n  state    {folder}"
    )
    run_devices(count, runtime, folder, folder / "logs")
    say("the run is over")
    return 0


def run_devices(count: int, runtime: Runtime, state: Path, logs: Path) -> None:
    """Supervise ``count`` devices to the end of the run. Raises the errors of ``supervise``."""
    open_log(logs / "devices.log", runtime.log_level)
    with _observed(runtime.metrics_port) as metrics:
        plan = SupervisorPlan(
            address=runtime.connect,
            count=count,
            state=state,
            code=DEVICE_CODE,
            trainers=runtime.trainers,
            per_process=runtime.per_process,
            device_type=runtime.device_type,
            logs=logs,
            observer=Told(metrics),
        )
        asyncio.run(supervise(plan))


class Told(MachineObserver):
    """Tells people when all devices are connected, and which processes are started again. Passes every event on."""

    def __init__(self, metrics: MachineObserver) -> None:
        self._metrics = metrics
        self._complete = False

    def devices(self, counts: Mapping[str, int]) -> None:
        self._metrics.devices(counts)
        if not self._complete and counts.get("connected") and not counts.get("starting"):
            self._complete = True
            say(f"{counted(counts['connected'])} connected")

    def restarted(self, kind: str) -> None:
        self._metrics.restarted(kind)
        # The planned crash of a device belongs to the experiment, so people are not told.
        if kind != "device":
            say(f"a {kind} ended and is started again")

    def queue_depth(self, depth: int) -> None:
        self._metrics.queue_depth(depth)

    def trained(self, seconds: float, done: int, failed: int) -> None:
        self._metrics.trained(seconds, done, failed)

    def buffered(self, device: int, samples: int, size: int) -> None:
        self._metrics.buffered(device, samples, size)


def say(text: str) -> None:
    """Print a line for people on stderr."""
    print(text, file=sys.stderr, flush=True)


def counted(devices: int) -> str:
    """A number of devices, in words."""
    return "1 device" if devices == 1 else f"{devices} devices"


def state_folder(environment: Mapping[str, str]) -> Path:
    """The folder for the state of devices: ``FEDEMU_STATE``, or ``fedemu`` in the user's state folder."""
    if chosen := environment.get("FEDEMU_STATE"):
        return Path(chosen).expanduser()
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "fedemu"


@contextmanager
def _observed(port: int) -> Iterator[MachineObserver]:
    if not port:
        yield Silent()
        return
    registry = CollectorRegistry()
    exporter = Exporter(registry, port)
    try:
        yield SupervisorMetrics(registry)
    finally:
        exporter.close()


def main(words: Sequence[str]) -> int:
    """The devices of ``fedemu run``.

    ``words`` are their number, the folders of state and logs, and the runtime as JSON.
    """
    count, state, logs, runtime = words

    def action() -> int:
        run_devices(int(count), Runtime.model_validate_json(runtime), Path(state), Path(logs))
        return 0

    return exit_code_of(action)
