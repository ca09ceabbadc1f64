"""Runs the devices of one machine. Only the trainers import torch.

``fedemu device`` does this, and so does the child that ``fedemu run`` starts.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from prometheus_client import CollectorRegistry

from fedemu.device.host.computing import how_it_computes
from fedemu.device.machine.observer import MachineObserver
from fedemu.device.machine.supervisor import SupervisorPlan, at_once, supervise
from fedemu.ops.experiment import Runtime
from fedemu.ops.figures import span
from fedemu.ops.homes import state_folder
from fedemu.ops.keys.choice import client_keys, is_private
from fedemu.ops.running.codes import INTERNAL_ERROR, INTERRUPTED
from fedemu.ops.running.device_code import DEVICE_CODE
from fedemu.ops.running.exits import exit_code_of
from fedemu.ops.terminal import say
from fedemu.ops.watching.exporter import Exporter
from fedemu.ops.watching.feed import LIVE, MACHINE, Feed, told_by
from fedemu.ops.watching.logs import open_log
from fedemu.ops.watching.metrics import SupervisorMetrics
from fedemu.protocol.addresses import check_address
from fedemu.protocol.code.named import place_of
from fedemu.protocol.code.source import source_of
from fedemu.protocol.errors import ConfigurationError, Interrupted, QuorumError, UnreachableError
from fedemu.protocol.host.files import usable
from fedemu.protocol.host.garbage import settle
from fedemu.protocol.host.phases import mark
from fedemu.protocol.transport.curve import ClientKeys
from fedemu.protocol.wording import counted


def supervise_alone(count: int, runtime: Runtime, state: Path | None) -> int:
    """Run devices until the coordinator says that the run is over, as ``fedemu device`` does. Returns the exit code."""
    require_host(runtime.connect)
    keys = client_keys(runtime, os.environ)
    require_code(runtime)
    folder = state if state is not None else state_folder(os.environ)
    with usable(folder, "choose another folder with --state"):
        folder.mkdir(parents=True, exist_ok=True)
    say(
        f"{counted(count, 'device')} for the coordinator at {runtime.connect}; "
        f"{'it waits' if count == 1 else 'they wait'} {runtime.connect_seconds:g} s for it\n"
        f"  process  {os.getpid()}\n{keys_line(runtime, keys)}  state    {folder}"
    )
    outcome, places = run_devices(count, runtime, folder, folder / "logs", own=False)
    code, words = ENDS.get(outcome, (0, outcome))
    say(f"the run is over: {words}")
    if idle := count - places:
        were = f"{idle:,} of these {counted(count, 'device')} {'was' if idle == 1 else 'were'} superfluous"
        say(f"{were}; --n {places} is enough" if places else were)
    return code


ENDS: Mapping[str, tuple[int, str]] = {
    "completed": (0, "completed"),
    "diverged": (0, "it diverged, because the model or too many replies were not finite"),
    "quorum": (QuorumError.exit_code, "too few devices replied in every try of a round"),
    "unreachable": (UnreachableError.exit_code, "not all devices of the experiment came in time"),
    "interrupted": (
        INTERRUPTED,
        "the coordinator was interrupted; start these devices again when it goes on (fedemu coordinator --resume)",
    ),
    "failed": (INTERNAL_ERROR, "an error ended the coordinator; its terminal and its log say which"),
}
"""By the reason of the coordinator's farewell: the exit code of the devices, and words for people."""


def keys_line(runtime: Runtime, keys: ClientKeys | None) -> str:
    """What people are told about the keys of devices. Nothing is told if they need none."""
    if keys is not None:
        return f"  keys     this machine is {quote(keys.public)}\n"
    if is_private(runtime.connect):
        return ""
    return "  keys     none: these devices do what whoever answers there says (--server-key KEY)\n"


def require_code(runtime: Runtime) -> None:
    """Raise ConfigurationError if code that is allowed is not on this machine. It would be refused later."""
    for name in runtime.allow_code:
        try:
            source_of(place_of(name))
        except ConfigurationError as error:
            raise ConfigurationError(f"--allow-code {name}: {error}") from None


def require_host(address: str) -> None:
    """Raise ConfigurationError if ``address`` names a host that does not resolve. It would never be found.

    Nor would one that has addresses of IPv6 only, unless it stands in brackets, nor what is no address.
    """
    check_address(address, listening=False)
    if not address.startswith("tcp://"):
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        found = {family for family, *_ in socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:  # no name has a part that is empty or of more than 63 characters
        why = error.strerror if isinstance(error, OSError) else "this is no name of a host"
        raise ConfigurationError(
            f"the host {host!r} of {address} cannot be found ({why}); give the coordinator's address with --connect"
        ) from error
    if socket.AF_INET not in found and not host.startswith("["):
        raise ConfigurationError(
            f"the host {host!r} of {address} has addresses of IPv6 only; write it in brackets: tcp://[{host}]:{port}"
        )


async def called(line: int) -> None:
    """Wait until ``launch`` says by its socket ``line`` that the coordinator waits for devices.

    Raises Interrupted if the run is over before that.
    """
    with socket.socket(fileno=line) as launcher:
        launcher.setblocking(False)
        try:
            said = await asyncio.get_running_loop().sock_recv(launcher, 1)
        except OSError:
            said = b""
    if not said:
        raise Interrupted("The run was over before its devices began.")


def run_devices(
    count: int, runtime: Runtime, state: Path, logs: Path, *, own: bool, line: int | None = None, beside: int = 1
) -> tuple[str, int]:
    """Supervise ``count`` devices to the end of the run. Returns its outcome, and for how many it had places.

    Raises the errors of ``supervise``. With a ``line``, they look for the coordinator when they are ``called`` there.
    As many machines as ``beside`` says share the GPUs that this process sees.

    ``own`` says that the same user has named the experiment on this machine, so that it may name any code. Other
    experiments may name that of ``runtime.allow_code``.
    """
    open_log(logs / "devices.log", runtime.log_level)

    def show(facts: Callable[[], dict[str, Any]]) -> None:
        Feed(state / LIVE, f"{MACHINE}{os.getpid()}", told_by(facts)).start()
        settle()

    with _observed(runtime) as metrics:
        told = Told(count, metrics)
        plan = SupervisorPlan(
            address=runtime.connect,
            count=count,
            state=state,
            code=DEVICE_CODE,
            trainers=runtime.trainers,
            beside=beside,
            per_process=runtime.per_process,
            device_type=runtime.device_type,
            compute=partial(how_it_computes, runtime.device_type),
            logs=logs,
            observer=told,
            keys=client_keys(runtime, os.environ),
            allow_code=None if own else tuple(map(place_of, runtime.allow_code)),
            shown=show,
            connect_seconds=runtime.connect_seconds,
            lost_seconds=runtime.lost_seconds,
            idle_seconds=runtime.idle_seconds,
            stuck_seconds=runtime.stuck_seconds,
            called=at_once if line is None else partial(called, line),
        )
        return asyncio.run(supervise(plan)), told.places


class Told(MachineObserver):
    """Tells people what they may have to do something about, and passes every event on to ``metrics``.

    That is: whether the run has places for all devices, when all are connected, whether the coordinator is gone or
    back, and which processes are started again. ``places`` is the number of places that the run has given.
    """

    def __init__(self, count: int, metrics: MachineObserver) -> None:
        self.places = 0
        self._count = count
        self._metrics = metrics
        self._complete = False

    def placed(self, places: int) -> None:
        self._metrics.placed(places)
        self.places = places
        if not places:
            say("all places of the run are taken; these devices wait until some are free, or the run is over")
        elif places < self._count:
            say(f"the run has places for {places:,} of these {counted(self._count, 'device')}; the others stay idle")

    def barred(self, reason: str) -> None:
        self._metrics.barred(reason)
        say(f"{reason}; these devices go on trying")

    def lost(self, seconds: float) -> None:
        self._metrics.lost(seconds)
        say(f"the coordinator is gone; these devices look for it for {seconds:.0f} s")

    def found(self) -> None:
        self._metrics.found()
        say("the coordinator is back")

    def devices(self, counts: Mapping[str, int]) -> None:
        self._metrics.devices(counts)
        if not self._complete and counts.get("connected") and not counts.get("starting"):
            self._complete = True
            asleep = "; they sleep until they are asked" if "awake" in counts else " connected"
            say(f"{counted(counts['connected'], 'device')}{asleep}")

    def restarted(self, kind: str) -> None:
        self._metrics.restarted(kind)
        # The planned crash of a device belongs to the experiment, so people are not told.
        if kind != "device":
            say(f"a {kind} ended and is started again")

    def hung(self, trainer: int, seconds: float, lacked: str, jobs: str) -> None:
        self._metrics.hung(trainer, seconds, lacked, jobs)
        say(f"trainer {trainer} {lacked} for {span(seconds)}; it is killed, and its work is done again: {jobs}")

    def queue_depth(self, depth: int) -> None:
        self._metrics.queue_depth(depth)

    def trained(self, seconds: float, done: int, failed: int) -> None:
        self._metrics.trained(seconds, done, failed)

    def given_up(self) -> None:
        self._metrics.given_up()

    def buffered(self, device: int, samples: int, size: int) -> None:
        self._metrics.buffered(device, samples, size)


@contextmanager
def _observed(runtime: Runtime) -> Iterator[MachineObserver]:
    if not runtime.metrics_port:
        yield MachineObserver()
        return
    registry = CollectorRegistry()
    exporter = Exporter(registry, runtime.metrics_port, runtime.metrics_address)
    try:
        yield SupervisorMetrics(registry)
    finally:
        exporter.close()


def main(words: Sequence[str]) -> int:
    """The devices of ``fedemu run``.

    ``words`` are their number, the folders of state and logs, the runtime as JSON, and perhaps the ``line`` on which
    they are ``called``, empty without one, and how many machines share the GPUs that this process sees.
    """
    count, state, logs, runtime, *more = words
    line = int(more[0]) if more and more[0] else None
    beside = int(more[1]) if len(more) > 1 else 1

    def action() -> int:
        settings = Runtime.model_validate_json(runtime)
        run_devices(int(count), settings, Path(state), Path(logs), own=True, line=line, beside=beside)
        mark("devices", "end")
        return 0  # the coordinator of the same command tells how the run ended

    return exit_code_of(action)
