"""What commands that start a run have in common: the folder of a new run is made, or that of an old one is opened."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from fedemu.ops.data.apart import find_data
from fedemu.ops.engines.places import patient, patient_machine, require_engine, require_no_edges
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.experiment.without_effect import WithoutEffect
from fedemu.ops.live.starting import start_page
from fedemu.ops.running.folder import claim, give_back, keep_grown, reopen, require_own_states
from fedemu.ops.running.portable import start_again_portably
from fedemu.ops.running.together import (
    refuse_metrics_at_address,
    require_metrics_ports,
    require_processor_here,
    require_room_here,
)
from fedemu.ops.running.words import is_complete
from fedemu.ops.terminal import say
from fedemu.ops.track.kinds import check as check_trackers
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.private import temporary_folder


def open_run(
    source: str | None,
    out: Path | None,
    resume: Path | None,
    overrides: list[str],
    given: Mapping[str, object],
    computes_here: bool = False,
) -> tuple[Path, Experiment, Runtime]:
    """Make a new run directory, or open the one to resume.

    Returns it with its experiment and this machine's settings. ``given`` are options that need others to have an
    effect. ``computes_here`` says that this process computes; with everything in one process it always does. Settings
    of a new run that have no effect are told.
    """
    without_effect = WithoutEffect()
    if resume is None:
        experiment, runtime = load_experiment(source, overrides, os.environ, without_effect)
    else:
        refuse_beside_resume(resume, source, out)
        experiment, runtime = reopen(resume, overrides, os.environ)
    require_effect(runtime, given)
    if computes_here or runtime.transport == "memory":
        start_again_portably(experiment)
    if computes_here:
        refuse_metrics_at_address(runtime)
    else:
        if is_elsewhere(runtime):
            require_engine(runtime.on)
            if resume is None:
                require_no_edges(experiment, f"--on {runtime.on}")
                experiment, _ = patient(experiment, runtime)
            runtime = patient_machine(runtime)
        require_metrics_ports(runtime)
        require_room_here(experiment, runtime)
    require_processor_here(runtime)
    temporary_folder()  # without one a run could not begin
    check_trackers(runtime.track.to, runtime.track.out)
    if resume is None:
        find_data(experiment)
        directory = claim(experiment, out)
        without_effect.tell(say)
        return directory, experiment, runtime
    if not computes_here and not is_complete(resume, experiment):
        require_own_states(resume, experiment, runtime)
    keep_grown(resume, experiment)
    return resume, experiment, runtime


def serve_page(directory: Path, *, new: bool) -> None:
    """Start the page of a run. A ``new`` directory is given back if it does not start, or if Ctrl-C comes meanwhile."""
    try:
        start_page(directory)
    except BaseException:
        if new:
            give_back(directory)
        raise


def require_effect(runtime: Runtime, given: Mapping[str, object]) -> None:
    """Raise ConfigurationError for an option that was given, and has no effect. None means that it was not given."""
    for option in (option for option, value in given.items() if value is not None):
        if option == "--metrics-address":
            if not runtime.metrics_port:
                raise ConfigurationError("--metrics-address needs --metrics-port, the port at which metrics are served")
        elif runtime.transport == "memory":
            raise ConfigurationError(
                f"{option} has no effect with the transport memory, where everything is one process; leave one out"
            )


def is_elsewhere(runtime: Runtime) -> bool:
    """Whether an engine places the devices: that of ``--on``, or of the setting ``runtime.on``."""
    return bool(runtime.on) and runtime.transport != "memory"


def refuse_beside_resume(resume: Path, source: str | None, out: Path | None) -> None:
    """Raise ConfigurationError if an experiment or ``--out`` was given beside ``--resume``."""
    for given, name in ((source, "an experiment"), (out, "--out")):
        if given is not None:
            raise ConfigurationError(
                f"--resume goes on with the experiment and the folder of {resume}; leave out {name}"
            )
