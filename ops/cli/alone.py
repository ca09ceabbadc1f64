"""The commands that start one side alone: a coordinator, the devices of one machine, or an edge between them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedemu.device.host.processors import require_processor
from fedemu.ops.cli.opening import open_run, require_effect, serve_page
from fedemu.ops.cli.shell import options
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import Format, overrides_of
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.running.codes import leaving_at_once
from fedemu.ops.running.folder import give_back
from fedemu.ops.running.words import conclude, is_complete

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
def coordinator(
    experiment: options.Experiment = None,
    out: options.Out = None,
    seed: options.Seed = None,
    rounds: options.Rounds = None,
    devices: options.Devices = None,
    resume: options.Resume = None,
    settings: options.Settings = None,
    bind: options.Bind = None,
    keys: options.Keys = None,
    insecure: options.Insecure = None,
    device_type: options.DeviceTypeOption = None,
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
        runtime__device_type=device_type,
        runtime__metrics_port=metrics_port,
        runtime__metrics_address=metrics_address,
        runtime__log_level=log_level,
    )
    given = {"--bind": bind, "--keys": keys, "--insecure": insecure, "--metrics-address": metrics_address}
    directory, checked, runtime = open_run(experiment, out, resume, overrides, given, computes_here=True)
    if resume is not None and is_complete(directory, checked):
        return conclude(directory, 0, "coordinator", new=False, print_summary=format is Format.JSON)
    # Importing torch takes seconds, and the error of a wrong setting should not wait for it.
    with leaving_at_once(lambda: resume is None and give_back(directory)):
        from fedemu.ops.running.coordinator import coordinate_alone

    if page:
        serve_page(directory, new=resume is None)
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
    require_effect(runtime, {"--metrics-address": metrics_address})
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
    require_effect(runtime, {"--metrics-address": metrics_address})
    require_processor(runtime.device_type)
    return supervise_alone(count, runtime, state)
