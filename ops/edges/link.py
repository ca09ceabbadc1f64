"""Whether the devices of a machine share its connection, as its experiment says."""

from __future__ import annotations

from fedemu.ops.experiment import Experiment


def link(experiment: bytes) -> str:
    """``fleet.link`` of an experiment in bytes."""
    return Experiment.from_bytes(experiment).fleet.link
