"""The command that plays a whole run on this machine, or one run for each of several seeds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.cli.opening import is_elsewhere, open_run, refuse_beside_resume, require_effect, serve_page
from fedemu.ops.cli.shell import options
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import Format, overrides_of
from fedemu.ops.engines.places import patient_machine, require_engine, require_no_edges, waits
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.experiment.without_effect import WithoutEffect
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
from fedemu.ops.running.together import require_metrics_ports, require_room_here, run_together
from fedemu.ops.running.words import conclude, is_complete
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError


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
    bind: options.Bind = None,
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
        if is_elsewhere(group.runtime):
            group = replace(group, runtime=patient_machine(group.runtime))
        return run_group(group, print_summaries=format is Format.JSON)
    directory, checked, runtime = open_run(experiment, out, resume, overrides, given)
    if resume is not None and is_complete(directory, checked):
        return conclude(directory, 0, "run", new=False, print_summary=format is Format.JSON)
    if page:
        serve_page(directory, new=resume is None)
    return run_together(
        directory, checked, runtime, new=resume is None, print_summary=format is Format.JSON, timed=timing
    )


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
    require_effect(runtime, given)
    longer = []
    if is_elsewhere(runtime):
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
        without_effect = WithoutEffect()
        group = new_group(source, chosen or [], out, overrides, os.environ, without_effect)
        without_effect.tell(say)
        return group
    refuse_beside_resume(resume, source, out)
    return reopen_group(resume, chosen, overrides, os.environ)
