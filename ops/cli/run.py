"""The commands that start a run, a coordinator, or the devices of one machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedemu.device.host.processors import require_processor
from fedemu.ops.cli import options
from fedemu.ops.cli.guarded import guarded
from fedemu.ops.cli.options import Format, overrides_of
from fedemu.ops.data.apart import find_data
from fedemu.ops.engines.places import patient, patient_machine, require_engine, require_no_edges, waits
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.live.starting import start_page
from fedemu.ops.running.folder import claim, give_back, keep_grown, reopen, require_own_states
from fedemu.ops.running.portable import start_again_portably
from fedemu.ops.running.seeds import (
    SeedGroup,
    is_group,
    new_group,
    parse_seeds,
    reopen_group,
    resumed_group,
    run_group,
)
from fedemu.ops.running.together import refuse_metrics_at, require_metrics_ports, require_room_here, run_together
from fedemu.ops.running.words import conclude, is_complete
from fedemu.ops.track.kinds import check as check_trackers
from fedemu.protocol.errors import ConfigurationError

Bind = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS", help="The address of the coordinator, as in tcp://0.0.0.0:5577.", show_default=False
    ),
]

Connect = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="The address of the coordinator or of an edge. Default: tcp://127.0.0.1:5577.",
        show_default=False,
    ),
]
ServerKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY|FILE",
        help="The public key that the other side must have. Then this machine's keys are used.",
        show_default=False,
    ),
]


@guarded
def run(
    experiment: options.Experiment = None,
    out: options.Out = None,
    seed: options.Seed = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="SEEDS",
            help="Run with each of these seeds, as in 0,1,2 or 0-4, into DIR/seed-N of --out DIR, and compare them.",
            show_default=False,
        ),
    ] = None,
    rounds: options.Rounds = None,
    devices: options.Devices = None,
    resume: options.Resume = None,
    settings: options.Settings = None,
    bind: Bind = None,
    keys: options.Keys = None,
    insecure: options.Insecure = None,
    metrics_port: options.MetricsPort = None,
    metrics_address: options.MetricsAddress = None,
    transport: Annotated[
        options.Transport | None,
        typer.Option(
            metavar="zmq|memory",
            help="zmq: real processes and sockets. memory: everything in one process. Default: zmq.",
            show_default=False,
        ),
    ] = None,
    trainers: options.Trainers = None,
    per_process: options.PerProcess = None,
    device_type: options.DeviceTypeOption = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="ENGINE",
            help="Place the devices on a Ray cluster: ray (that of RAY_ADDRESS, or one of its own on this machine), or "
            "ray://HOST:PORT.",
            show_default=False,
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="With --on: on how many nodes. Default: on all there are.", min=1, show_default=False
        ),
    ] = None,
    page: options.Page = False,
    log_level: options.LogLevelOption = None,
    timing: Annotated[
        bool,
        typer.Option("--timing", help="At the end, show where each second went, by process, and keep it in the run."),
    ] = False,
    format: options.FormatOption = Format.TEXT,
) -> int:
    """Run an experiment on this machine: coordinator, devices, progress, report. Ctrl-C stops it with a checkpoint.

    No port is opened unless --bind names an address. With --seeds there is one run for each seed, one after another,
    and --resume continues those that are not done.
    """
    overrides = overrides_of(
        settings,
        seed=seed,
        rounds=rounds,
        fleet__devices=devices,
        runtime__bind=bind,
        runtime__keys=keys,
        runtime__insecure=insecure,
        runtime__metrics_port=metrics_port,
        runtime__metrics_address=metrics_address,
        runtime__transport=transport,
        runtime__trainers=trainers,
        runtime__per_process=per_process,
        runtime__device_type=device_type,
        runtime__log_level=log_level,
        runtime__on=on,
        runtime__nodes=nodes,
    )
    given = {
        "--bind": bind,
        "--keys": keys,
        "--insecure": insecure,
        "--on": on,
        "--trainers": trainers,
        "--per-process": per_process,
        "--metrics-address": metrics_address,
    }
    if nodes is not None and on is None:
        raise ConfigurationError("--nodes is the number of nodes of a Ray cluster; add --on ray, or leave out --nodes")
    if on is not None:
        require_engine(on)
    if seeds is not None or (resume is not None and is_group(resume)):
        if page:
            raise ConfigurationError("--page is for one run, and here are several seeds; watch them with fedemu watch")
        if timing:
            raise ConfigurationError("--timing is for one run, and here are several seeds; leave out --timing")
        overrides += _prepare_group(experiment, resume, overrides, given)
        group = _open_group(experiment, out, resume, seeds, seed, overrides)
        if _is_elsewhere(group.runtime):
            group = replace(group, runtime=patient_machine(group.runtime))
        return run_group(group, print_summaries=format is Format.JSON)
    directory, checked, runtime = _open(experiment, out, resume, overrides, given)
    if resume is not None and is_complete(directory, checked):
        return conclude(directory, 0, "run", new=False, print_summary=format is Format.JSON)
    if page:
        _serve_page(directory, new=resume is None)
    return run_together(
        directory, checked, runtime, new=resume is None, print_summary=format is Format.JSON, timed=timing
    )


@guarded
def coordinator(
    experiment: options.Experiment = None,
    out: options.Out = None,
    seed: options.Seed = None,
    rounds: options.Rounds = None,
    devices: options.Devices = None,
    resume: options.Resume = None,
    settings: options.Settings = None,
    bind: Bind = None,
    keys: options.Keys = None,
    insecure: options.Insecure = None,
    metrics_port: options.MetricsPort = None,
    metrics_address: options.MetricsAddress = None,
    page: options.Page = False,
    log_level: options.LogLevelOption = None,
    format: options.FormatOption = Format.TEXT,
) -> int:
    """Run a coordinator and wait for devices, which `fedemu device` starts.

    Listens on tcp://127.0.0.1:5577 by default. An address that other machines can reach needs keys (`fedemu keys`).
    """
    overrides = overrides_of(
        settings,
        seed=seed,
        rounds=rounds,
        fleet__devices=devices,
        runtime__bind=bind,
        runtime__keys=keys,
        runtime__insecure=insecure,
        runtime__metrics_port=metrics_port,
        runtime__metrics_address=metrics_address,
        runtime__log_level=log_level,
    )
    given = {"--bind": bind, "--keys": keys, "--insecure": insecure, "--metrics-address": metrics_address}
    directory, checked, runtime = _open(experiment, out, resume, overrides, given, computes_here=True)
    if resume is not None and is_complete(directory, checked):
        return conclude(directory, 0, "coordinator", new=False, print_summary=format is Format.JSON)
    try:
        # Importing torch takes seconds, and the error of a wrong setting should not wait for it.
        from fedemu.ops.running.coordinator import coordinate_alone
    except KeyboardInterrupt:
        if resume is None:
            give_back(directory)
        raise

    if page:
        _serve_page(directory, new=resume is None)
    return coordinate_alone(directory, checked, runtime, new=resume is None, print_summary=format is Format.JSON)


@guarded
def edge(
    bind: Annotated[
        str, typer.Option(metavar="DOWN", help="The address at which machines reach this edge, as tcp://0.0.0.0:5578.")
    ],
    connect: Connect = None,
    server_key: ServerKey = None,
    keys: options.Keys = None,
    insecure: options.Insecure = None,
    metrics_port: options.MetricsPort = None,
    metrics_address: options.MetricsAddress = None,
    log_level: options.LogLevelOption = None,
) -> int:
    """Run an edge between a coordinator, or another edge, and machines that connect to it as to a coordinator.

    It fetches large values once for all of them, and sends one sum of their devices' results.
    """
    # The other commands do not need what this imports.
    from fedemu.ops.edges.edge import edge_alone

    overrides = overrides_of(
        None,
        runtime__bind=bind,
        runtime__connect=connect,
        runtime__server_key=server_key,
        runtime__keys=keys,
        runtime__insecure=insecure,
        runtime__metrics_port=metrics_port,
        runtime__metrics_address=metrics_address,
        runtime__log_level=log_level,
    )
    _, runtime = load_experiment(None, overrides, os.environ)
    _require_effect(runtime, {"--metrics-address": metrics_address})
    return edge_alone(runtime)


@guarded
def device(
    count: Annotated[int, typer.Option("--n", metavar="N", help="The number of devices of this machine.", min=1)] = 1,
    connect: Connect = None,
    server_key: ServerKey = None,
    keys: options.Keys = None,
    allow_code: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A module or a Python file, as the coordinator's experiment names it, that these devices may run. "
            "Nothing else runs that does not come with fedemu. Can be repeated.",
            show_default=False,
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The folder for the state of the devices. The same folder brings the same devices back. "
            "Default: FEDEMU_STATE, or fedemu in the user's state folder.",
            show_default=False,
        ),
    ] = None,
    trainers: options.Trainers = None,
    per_process: options.PerProcess = None,
    device_type: options.DeviceTypeOption = None,
    metrics_port: options.MetricsPort = None,
    metrics_address: options.MetricsAddress = None,
    log_level: options.LogLevelOption = None,
) -> int:
    """Start the devices of one machine, each in a process of its own.

    The coordinator sends them everything they need.
    """
    # The other commands do not need what this imports.
    from fedemu.ops.running.devices import supervise_alone

    overrides = overrides_of(
        None,
        runtime__connect=connect,
        runtime__server_key=server_key,
        runtime__keys=keys,
        runtime__allow_code=allow_code or None,
        runtime__trainers=trainers,
        runtime__per_process=per_process,
        runtime__device_type=device_type,
        runtime__metrics_port=metrics_port,
        runtime__metrics_address=metrics_address,
        runtime__log_level=log_level,
    )
    _, runtime = load_experiment(None, overrides, os.environ)
    _require_effect(runtime, {"--metrics-address": metrics_address})
    require_processor(runtime.device_type)
    return supervise_alone(count, runtime, state)


def _open(
    source: str | None,
    out: Path | None,
    resume: Path | None,
    overrides: list[str],
    given: Mapping[str, object],
    computes_here: bool = False,
) -> tuple[Path, Experiment, Runtime]:
    """Make a new run directory, or open the one to resume.

    Returns it with its experiment and this machine's settings. ``given`` are options that need others to have an
    effect. ``computes_here`` says that this process computes; with everything in one process it always does.
    """
    if resume is None:
        experiment, runtime = load_experiment(source, overrides, os.environ)
    else:
        _refuse_beside_resume(resume, source, out)
        experiment, runtime = reopen(resume, overrides, os.environ)
    _require_effect(runtime, given)
    if computes_here or runtime.transport == "memory":
        start_again_portably(experiment)
    if computes_here:
        refuse_metrics_at(runtime.bind, runtime)
    else:
        if _is_elsewhere(runtime):
            require_engine(runtime.on)
            if resume is None:
                require_no_edges(experiment, f"--on {runtime.on}")
                experiment, _ = patient(experiment, runtime)
            runtime = patient_machine(runtime)
        require_metrics_ports(runtime)
        require_room_here(experiment, runtime)
    require_processor(runtime.device_type)
    check_trackers(runtime.track.to, runtime.track.out)
    if resume is None:
        find_data(experiment)
        return claim(experiment, out), experiment, runtime
    if not computes_here and not is_complete(resume, experiment):
        require_own_states(resume, experiment, runtime)
    keep_grown(resume, experiment)
    return resume, experiment, runtime


def _serve_page(directory: Path, *, new: bool) -> None:
    """Start the page of a run. A ``new`` directory is given back if it does not start, or if Ctrl-C comes meanwhile."""
    try:
        start_page(directory)
    except BaseException:
        if new:
            give_back(directory)
        raise


def _require_effect(runtime: Runtime, given: Mapping[str, object]) -> None:
    """Raise ConfigurationError for an option that was given, and has no effect. None means that it was not given."""
    for option in (option for option, value in given.items() if value is not None):
        if option == "--metrics-address":
            if not runtime.metrics_port:
                raise ConfigurationError("--metrics-address needs --metrics-port, the port at which metrics are served")
        elif runtime.transport == "memory":
            raise ConfigurationError(
                f"{option} has no effect with the transport memory, where everything is one process; leave one out"
            )


def _is_elsewhere(runtime: Runtime) -> bool:
    """Whether an engine places the devices: that of ``--on``, or of the setting ``runtime.on``."""
    return bool(runtime.on) and runtime.transport != "memory"


def _prepare_group(
    source: str | None, resume: Path | None, overrides: list[str], given: Mapping[str, object]
) -> list[str]:
    """Check options and ports, and start again with the variables of a portable experiment if this process computes.

    No folder has been made yet. Returns further overrides: the waits of an engine, if one places the devices.
    """
    if resume is None:
        experiment, runtime = load_experiment(source, overrides, os.environ)
    else:
        experiment, runtime = resumed_group(resume, overrides, os.environ)
    _require_effect(runtime, given)
    longer = []
    if _is_elsewhere(runtime):
        require_engine(runtime.on)
        if resume is None:
            require_no_edges(experiment, f"--on {runtime.on}")
            longer = waits(experiment, runtime)
    require_metrics_ports(runtime)
    require_room_here(experiment, runtime)
    if runtime.transport == "memory":
        start_again_portably(experiment)
    return longer


def _open_group(
    source: str | None,
    out: Path | None,
    resume: Path | None,
    seeds: str | None,
    seed: int | None,
    overrides: list[str],
) -> SeedGroup:
    """Make the run directories of several seeds, or open those to resume."""
    among_settings = any(override.partition("=")[0].strip() == "seed" for override in overrides)
    for given, name in ((seed is not None, "--seed"), (among_settings, "--set seed")):
        if given:
            raise ConfigurationError(f"{name} is for one run, and here are several seeds; leave out {name}")
    chosen = None if seeds is None else parse_seeds(seeds)
    if resume is None:
        return new_group(source, chosen or [], out, overrides, os.environ)
    _refuse_beside_resume(resume, source, out)
    return reopen_group(resume, chosen, overrides, os.environ)


def _refuse_beside_resume(resume: Path, source: str | None, out: Path | None) -> None:
    """Raise ConfigurationError if an experiment or ``--out`` was given beside ``--resume``."""
    for given, name in ((source, "an experiment"), (out, "--out")):
        if given is not None:
            raise ConfigurationError(
                f"--resume goes on with the experiment and the folder of {resume}; leave out {name}"
            )
