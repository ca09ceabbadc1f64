"""The run that nothing disturbs, against which a disturbed one is held."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedemu.coordinator.record.run import read_summary
from fedemu.ops.stress.fleet import FleetTimeout
from fedemu.ops.stress.warm import WarmStart


def undisturbed(experiment: str, settings: Sequence[str], directory: Path, warm: WarmStart) -> str:
    """The model digest of a run with these settings, played in one process. ``directory`` becomes its run directory.

    Raises FleetTimeout if the run does not end as it should.
    """
    log = directory.with_name(f"{directory.name}.log")
    words = [f"--set={setting}" for setting in settings]
    run = warm.start(["run", experiment, "--transport", "memory", *words, "--out", str(directory)], log, os.environ)
    if (code := run.wait(600)) != 0:
        raise FleetTimeout(f"the undisturbed run of {experiment} ended with exit {code}: {log.read_text()[-500:]}")
    return str(read_summary(directory)["model_digest"])
