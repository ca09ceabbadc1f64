"""``fedemu run``: runs a coordinator and its devices on this machine, from the first line on stderr to the last."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedemu.coordinator.service.open_files import files_for, require_files
from fedemu.device.host.limits import demand, require_room
from fedemu.device.host.processors import likely_trainers, require_processor
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.runtime import Track
from fedemu.ops.keys.choice import in_words, server_keys
from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.running.codes import INTERNAL_ERROR, INTERRUPTED, USAGE, leaving_at_once
from fedemu.ops.running.exits import complain, exit_code_of
from fedemu.ops.running.folder import give_back, require_alone
from fedemu.ops.running.launch import DEVICES_OUTPUT, child_command, launch, with_port
from fedemu.ops.running.launch_rules import Child
from fedemu.ops.running.portable import environment_for
from fedemu.ops.running.timing import read_timing, table, timing
from fedemu.ops.running.words import at_address, conclude, liveness_line, processes, title
from fedemu.ops.terminal import COMPLAINT, can_redraw, last_words, say
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import GO_ON, usable
from fedemu.protocol.host.paths import exists
from fedemu.protocol.host.private import private_folder

ONE_MACHINE = ("fedemu-devices", "fedemu.ops.running.devices")
LAST_PORT = 65535
OWN_CLUSTER = ("", "local")
"""The values of ``RAY_ADDRESS`` with which Ray begins a cluster on this machine alone."""
_SHOW_CURSOR = "\x1b[?25h"


def run_together(
    directory: Path,
    experiment: Experiment,
    runtime: Runtime,
    *,
    new: bool,
    print_summary: bool,
    heading: str | None = None,
    timed: bool = False,
) -> int:
    """Run an experiment to its end and tell people the results. Returns the exit code.

    ``new`` says that the directory was claimed just now. ``heading`` is a line for people that is shown when the run
    begins. ``timed`` tells where each second went when the run has ended.
    """
    begins = title(experiment)
    if heading is not None:
        begins = f"{heading}\n{begins}"
    try:
        if not new:
            require_alone(directory)
        with timing(directory, timed):
            code = _play(directory, experiment, runtime, begins, new)
    except ConfigurationError as error:
        complain(str(error))
        code = USAGE
    except KeyboardInterrupt:
        code = INTERRUPTED
    code = conclude(directory, code, at_address("run", runtime), new=new, print_summary=print_summary)
    if timed and code != USAGE and (found := read_timing(directory)):
        say(table(found))
    return code


def require_metrics_ports(runtime: Runtime) -> None:
    """Raise ConfigurationError if the metrics of coordinator and devices cannot have the ports that are theirs."""
    if runtime.transport == "memory":
        return
    if "bind" in runtime.model_fields_set:
        refuse_metrics_at_address(runtime)
    if runtime.metrics_port == LAST_PORT:
        raise ConfigurationError(
            f"runtime.metrics_port = {LAST_PORT} leaves no port after it, which the devices' metrics need, too; "
            f"choose one below {LAST_PORT}"
        )


def require_room_here(experiment: Experiment, runtime: Runtime) -> None:
    """Raise ConfigurationError if this machine cannot hold the fleet of ``fedemu run``, before anything is written.

    A supervisor looks again when it has been told how many devices it gets, and is the first to look if devices sleep,
    if there are edges, and if an engine places the devices.
    """
    fleet = experiment.fleet
    if runtime.transport == "memory" or runtime.on or experiment.tree.edges or fleet.wake == "on-demand":
        return
    trainers = runtime.trainers or likely_trainers(runtime.device_type)
    address = runtime.bind if "bind" in runtime.model_fields_set else "ipc://"
    of_coordinator = files_for(fleet.devices, fleet.link == "shared", address)
    of_devices, _, _ = demand(fleet.devices, runtime.per_process, trainers)
    if of_coordinator > of_devices:  # both inherit one limit: the larger need is told
        require_files(of_coordinator, address)
    require_room(fleet.devices, runtime.per_process, trainers, bool(runtime.keys))


def require_processor_here(runtime: Runtime) -> None:
    """Raise ConfigurationError if trainers are to compute on CUDA and torch finds none here.

    If an engine places the devices, they compute on its nodes, where the engine looks.
    """
    if not runtime.on or runtime.transport == "memory":
        require_processor(runtime.device_type)


def refuse_metrics_at_address(runtime: Runtime) -> None:
    """Raise ConfigurationError if metrics would be served where their process listens for others."""
    metrics = f"tcp://{runtime.metrics_address}:{runtime.metrics_port}"
    if runtime.metrics_port and places(reachable(runtime.bind)) & places(reachable(metrics)):
        raise ConfigurationError(
            f"--bind {runtime.bind} and --metrics-port {runtime.metrics_port} are one place; give one of them another "
            "port"
        )


def _play(directory: Path, experiment: Experiment, runtime: Runtime, begins: str, new: bool) -> int:
    if runtime.transport == "memory":
        # Only the process that computes imports torch. Here it is this process.
        with leaving_at_once(lambda: new and give_back(directory)):
            from fedemu.ops.running.coordinator import coordinate

        place = f"{begins}\n  everything in process {os.getpid()}\n  results      {directory}"
        return exit_code_of(lambda: coordinate(directory, experiment, runtime, lambda address: say(place)))
    with private_folder() as folder:
        return _launch_both(directory, experiment, runtime, begins, f"ipc://{folder}/coordinator")


def _launch_both(directory: Path, experiment: Experiment, runtime: Runtime, begins: str, private: str) -> int:
    """Run coordinator and devices. They meet at the address ``private``, unless the user has named another one.

    If an engine places the devices elsewhere, they meet at an address that its nodes can reach, with keys.
    """
    if runtime.on:
        runtime = _reachable_elsewhere(directory, runtime)
    chosen = with_port(runtime.bind) if "bind" in runtime.model_fields_set else private
    runtime = runtime.model_copy(update={"bind": chosen, "connect": reachable(chosen)})
    logs = directory / "logs"
    devices_terminal = logs / DEVICES_OUTPUT
    with usable(directory, GO_ON):
        logs.mkdir(exist_ok=True)
        devices_terminal.touch()
    # The supervisor serves its metrics on the port after the coordinator's.
    keys = server_keys(runtime, os.environ)
    training = runtime.model_copy(
        update={
            "metrics_port": runtime.metrics_port and runtime.metrics_port + 1,
            "server_key": "" if keys is None else keys.public,
            "keys": "" if keys is None else runtime.keys,
            "device_type": "cpu" if experiment.compute.portable else runtime.device_type,
            "track": Track(),  # the coordinator alone tells trackers, whose addresses may hold passwords
        }
    )
    levels = experiment.tree.edges
    commands: dict[Child, list[str]] = {
        "coordinator": child_command("fedemu-coordinator", "fedemu.ops.running.coordinator", str(directory)),
        "devices": child_command(
            *(("fedemu-tree", "fedemu.ops.edges.tree", json.dumps(levels)) if levels else ONE_MACHINE),
            str(experiment.fleet.devices),
            str(directory / "devices"),
            str(logs),
            training.model_dump_json(),
        )
        if not runtime.on
        else child_command(
            "fedemu-ray",
            "fedemu.ops.engines.on_ray",
            str(directory),
            str(experiment.fleet.devices),
            training.model_dump_json(),
        ),
    }

    def started(pids: Mapping[Child, int]) -> None:
        say(
            f"{begins}\n{warning}"
            f"  coordinator  process {pids['coordinator']} at {chosen}\n"
            f"  devices      process {pids['devices']}, {processes(experiment, runtime)}\n"
            f"{liveness_line(experiment)}"
            f"  results      {directory}"
        )

    warning = f"  keys         {in_words(runtime, os.environ, keys)}\n" if "bind" in runtime.model_fields_set else ""
    terminal = can_redraw(sys.stderr)

    def interject(text: str) -> None:
        # On a terminal the cursor is at the end of the coordinator's display.
        say(f"\n{text}" if terminal else text)

    outputs: dict[Child, Path | None] = {"coordinator": None, "devices": devices_terminal}
    ended = launch(
        commands,
        outputs,
        interject,
        started,
        environment=environment_for(experiment),
        told={"coordinator": runtime.model_dump_json()},
    )
    if terminal:
        # A display that was killed has left the cursor hidden.
        sys.stderr.write(_SHOW_CURSOR)
    if ended.devices_said_why:
        say(
            last_words(devices_terminal)
            or f"{COMPLAINT}an error ended the devices; a line above or {logs} may say which"
        )
    if ended.exit_code and runtime.log_level == "debug":
        with suppress(OSError):  # the folder may be gone, or let nobody in any more
            say(devices_terminal.read_text(encoding="utf-8", errors="replace"))
    return INTERNAL_ERROR if ended.exit_code is None else ended.exit_code


def _reachable_elsewhere(directory: Path, runtime: Runtime) -> Runtime:
    """The runtime with an address for other machines, and with keys, which are made in the run directory."""
    # A cluster whose head is at a loopback address may have nodes on other machines.
    here = runtime.on == "ray" and os.environ.get("RAY_ADDRESS", "") in OWN_CLUSTER
    told = {} if "bind" in runtime.model_fields_set else {"bind": f"tcp://{'127.0.0.1' if here else '0.0.0.0'}:0"}
    if not runtime.keys:
        keys = KeyFolder(directory / "keys")
        if not exists(keys.secret_file):
            keys.new()
        told["keys"] = str(keys.path.absolute())
    return runtime.model_copy(update=told)


def reachable(bind: str) -> str:
    """The address at which this machine reaches ``bind``. The wildcard host becomes the loopback address."""
    return bind.replace("//*:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def places(address: str) -> set[str | tuple[object, ...]]:
    """The hosts and ports that an address of a socket stands for. A port that is not chosen yet has none."""
    if not address.startswith("tcp://"):
        return {address}
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return set()
    return {place[:2] for *_, place in found if place[1]}
