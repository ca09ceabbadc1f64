"""Runs a coordinator: makes its plan from an experiment, plays it to the end, shows progress and writes the report.

``fedemu coordinator`` does this, and so does the child that ``fedemu run`` starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

from fedemu.coordinator.fleet.admission import Quotas
from fedemu.coordinator.observer import RunObserver
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.rounds.server_job_worker import leave_gpu_to_jobs
from fedemu.coordinator.serve import serve
from fedemu.coordinator.service.open_files import allow_files, files_for
from fedemu.device.host.computing import how_it_coordinates
from fedemu.device.host.processors import ask_for_cuda
from fedemu.ops.assembly.coordinator import assemble
from fedemu.ops.assembly.named_code import allowing
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import read_frozen
from fedemu.ops.keys.choice import in_words as keys_in_words
from fedemu.ops.keys.choice import reachable_elsewhere, server_keys
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.running.embedded import serve_embedded
from fedemu.ops.running.exits import complain, exit_code_of
from fedemu.ops.running.folder import naming_version, require_alone
from fedemu.ops.running.launch import child_command
from fedemu.ops.running.processes import announce
from fedemu.ops.running.timing import timed
from fedemu.ops.running.words import at_address, conclude, liveness_line, title
from fedemu.ops.terminal import say
from fedemu.ops.track.live import followers
from fedemu.ops.watching.display import console_of_stderr, open_display
from fedemu.ops.watching.feed import LIVE
from fedemu.ops.watching.fleet_feed import FleetFeed
from fedemu.ops.watching.logs import LogObserver, open_log
from fedemu.ops.watching.metrics import ServedMetrics
from fedemu.ops.watching.progress import Progress
from fedemu.protocol.errors import ConfigurationError, Interrupted, QuorumError
from fedemu.protocol.host.files import shortage, write_whole
from fedemu.protocol.host.garbage import settle
from fedemu.protocol.host.kernel import stop_signals
from fedemu.protocol.host.phases import mark, part
from fedemu.protocol.host.private import leave_private
from fedemu.protocol.host.streams import printed_for_people
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.interface import Network
from fedemu.protocol.transport.memory import MemoryNetwork
from fedemu.protocol.transport.zeromq import ZmqNetwork

ADDRESS = "address"
"""The file of a run directory that has the address of the coordinator while it listens."""


def coordinate_alone(
    directory: Path, experiment: Experiment, runtime: Runtime, *, new: bool, print_summary: bool
) -> int:
    """Run a coordinator until the experiment is over, as ``fedemu coordinator`` does. Returns the exit code."""
    again = runtime

    def action() -> int:
        if not new:
            require_alone(directory)
        keys = server_keys(runtime, os.environ)
        server_key = f" --server-key {quote(keys.public)}" if keys else ""

        def bring(address: str) -> str:
            connect = f"fedemu device --n {experiment.fleet.devices} --connect {quote(reachable_elsewhere(address))}"
            return f"{connect}{server_key}{allowing(experiment)}"

        def opened(address: str) -> None:
            nonlocal again
            if runtime.bind.endswith((":0", ":*")):  # the devices of this run look for it at the port that it got
                again = runtime.model_copy(update={"bind": address})
            say(
                f"{title(experiment)}\n"
                f"  process  {os.getpid()}\n"
                f"  address  {address}   ({bring(address)})\n"
                f"  keys     {keys_in_words(runtime, os.environ, keys)}\n"
                f"{liveness_line(experiment)}"
                f"  results  {directory}"
            )

        return coordinate(directory, experiment, runtime, opened, bring)

    code = exit_code_of(action)
    return conclude(directory, code, at_address("coordinator", again), new=new, print_summary=print_summary)


def coordinate(
    directory: Path,
    experiment: Experiment,
    runtime: Runtime,
    opened: Callable[[str], None],
    bring: Callable[[str], str] = lambda address: "",
) -> int:
    """Play the run in a claimed directory to its end, and write its report. Returns the exit code.

    ``opened`` is called with its address when the coordinator begins to wait for devices, before anything is shown.
    Before that, an experiment may turn out to be impossible. ``bring`` tells for this address the command with which
    people bring devices. While the coordinator listens, which it does not in memory, the file ``address`` of the
    directory has its address. Raises every FedemuError that ends a run early, except Interrupted, for which the code
    INTERRUPTED is returned.
    """
    open_log(directory / "logs" / "coordinator.log", runtime.log_level)
    if runtime.transport != "memory":
        shared = experiment.fleet.link == "shared" or bool(experiment.tree.edges)
        allow_files(files_for(experiment.fleet.devices, shared, runtime.bind), runtime.bind)
    state = Progress(
        experiment.name,
        experiment.rounds,
        experiment.fleet.devices,
        time.monotonic,
        virtual=experiment.clock.kind == "virtual",
    )
    told = followers(directory, runtime.track, child_command, complain)
    with _metrics(runtime, experiment.rounds) as metrics, told as trackers:
        try:
            # What somebody's own code prints is for people.
            with contextlib.ExitStack() as shown, printed_for_people():
                display = open_display(state, console_of_stderr())

                def begin(address: str) -> None:
                    state.bring = bring(address)
                    if runtime.transport != "memory":
                        write_whole(directory / ADDRESS, reachable_elsewhere(address))
                        shown.callback(_remove, directory / ADDRESS)
                    opened(address)
                    shown.enter_context(display)
                    if runtime.transport != "memory":  # otherwise this may be a notebook, whose objects come and go
                        settle()

                observers: list[RunObserver] = [LogObserver(), *metrics.observers, display]
                observers += [*timed(experiment.rounds), *trackers]
                summary = asyncio.run(_serve(directory, experiment, runtime, observers, begin))
        except QuorumError:
            metrics.ended("quorum")
            if runtime.report:
                _report(directory)
            raise
        except Interrupted:
            metrics.ended("interrupted")
            return INTERRUPTED
        except ConfigurationError:
            raise
        except Exception:
            metrics.ended("failed")
            raise
        metrics.ended(summary.outcome)
        mark("coordinator", "farewell")
        code = _report(directory) if runtime.report else 0
        mark("coordinator", "report")
        return code


def _remove(path: Path) -> None:
    """Remove a file that helps nobody any more. If the disk refuses, what needs the disk will say it."""
    with contextlib.suppress(OSError):
        path.unlink()


async def _serve(
    directory: Path,
    experiment: Experiment,
    runtime: Runtime,
    observers: Sequence[RunObserver],
    opened: Callable[[str], None],
) -> Summary:
    in_memory = runtime.transport == "memory"
    network = MemoryNetwork() if in_memory else _network(runtime)
    try:
        quotas = Quotas(runtime.devices_per_key, runtime.connections_per_key, runtime.messages_per_second)
        watched = FleetFeed(directory / LIVE)
        device_type = "cpu" if experiment.compute.portable else runtime.device_type
        if device_type != "cpu":
            ask_for_cuda()
            if not in_memory:  # where the trainer of this process opens the GPU
                leave_gpu_to_jobs()
        with naming_version(directory):
            made = assemble(directory, experiment, network, runtime.bind, [*observers, watched])
        compute = how_it_coordinates(device_type)
        settings = replace(
            made.settings,
            idle_seconds=runtime.idle_seconds,
            stuck_seconds=runtime.stuck_seconds,
            mixed_compute=runtime.mixed_compute,
            # From now on jobs need the GPU that is there now: on a processor they would come to other bits.
            device_type="cuda" if compute.gpus else "cpu",
        )
        plan = replace(made, opened=opened, quotas=quotas, shown=watched.start, settings=settings, compute=compute)
        mark("coordinator", "data and method")
        try:
            return await (serve_embedded(plan, runtime) if in_memory else serve(plan))
        finally:
            watched.stop()
    finally:
        network.close()


def _network(runtime: Runtime) -> Network:
    """The network at whose address devices are awaited. Within this machine it needs no library, unless with keys."""
    keys = server_keys(runtime, os.environ)
    if keys is None and runtime.bind.startswith("ipc://"):
        return DirectNetwork(asyncio.get_running_loop())
    return ZmqNetwork(keys=keys)


def _report(directory: Path) -> int:
    """Write the report, and return the exit code.

    The run is on disk by now, so an error is told and has no other effect.
    """
    try:
        with _interruptible():
            # Importing matplotlib takes a second, for which a run that fails before its first round need not wait.
            with part("imports of the report"):
                from fedemu.ops.report.report import write_report

            write_report(directory)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        logging.getLogger(__name__).exception("the report could not be written")
        why = shortage(error) or str(error) or type(error).__name__
        complain(f"the report could not be written ({why}); `fedemu report {quote(str(directory))}` tries again")
    return 0


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """The signals that stop a process raise KeyboardInterrupt here.

    After a run the handlers of the coordinator are gone. The default ones would end this process without a word.
    """
    old = {sign: signal.signal(sign, signal.default_int_handler) for sign in stop_signals()}
    try:
        yield
    finally:
        for sign, handler in old.items():
            signal.signal(sign, handler)


@contextlib.contextmanager
def _metrics(runtime: Runtime, rounds: int) -> Iterator[ServedMetrics]:
    """The metrics of a run with ``rounds`` rounds, served as ``runtime`` says. Port 0 serves nothing.

    How the run ended is served until a monitor has read it, for a second at most.
    """
    served = ServedMetrics(runtime.metrics_port, rounds, runtime.metrics_address)
    try:
        yield served
    finally:
        with contextlib.suppress(KeyboardInterrupt), _interruptible():
            served.close()


def main(words: Sequence[str]) -> int:
    """The coordinator of ``fedemu run``.

    ``words`` are the run directory, and the line of ``announce``. The runtime comes as JSON from stdin: it may hold the
    password of a tracker.
    """
    directory, line = Path(words[0]), int(words[1])

    def action() -> int:
        with open(0, "rb", closefd=False) as stdin:
            runtime = Runtime.model_validate_json(stdin.read())
        try:
            return coordinate(directory, read_frozen(directory), runtime, lambda address: announce(line))
        finally:
            leave_private(runtime.bind)

    return exit_code_of(action)
