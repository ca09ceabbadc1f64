"""The run that nothing disturbs, against which a disturbed one is held."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedemu.coordinator.record.row import Row, read_rows
from fedemu.coordinator.record.run import read_summary
from fedemu.ops.stress.fleet import FleetTimeout, Start


@dataclass(frozen=True)
class Undisturbed:
    """What an undisturbed run ended with: the ``digest`` of its model, and its ``rows``."""

    digest: str
    rows: tuple[Row, ...]

    @classmethod
    def read(cls, directory: Path) -> Undisturbed:
        """The end of the run in this directory, which has to be over."""
        return cls(str(read_summary(directory)["model_digest"]), read_rows(directory))


def undisturbed(experiment: str, settings: Sequence[str], directory: Path, start: Start) -> Undisturbed:
    """The end of a run with these settings, played in one process. ``directory`` becomes its run directory.

    ``start`` starts the process. Raises FleetTimeout if the run does not end as it should.
    """
    log = directory.with_name(f"{directory.name}.log")
    words = [f"--set={setting}" for setting in settings]
    run = start(["run", experiment, "--transport", "memory", *words, "--out", str(directory)], log, os.environ)
    if (code := run.wait(600)) != 0:
        raise FleetTimeout(f"the undisturbed run of {experiment} ended with exit {code}: {log.read_text()[-500:]}")
    return Undisturbed.read(directory)
