"""Whether the devices of a machine share its connection, and whether they sleep, as its experiment says."""

from __future__ import annotations

from fedemu.ops.experiment import Experiment


def link(experiment: bytes) -> str:
    """``fleet.link`` of an experiment in bytes."""
    return Experiment.from_bytes(experiment).fleet.link


def wake(experiment: bytes) -> str:
    """``fleet.wake`` of an experiment in bytes."""
    return Experiment.from_bytes(experiment).fleet.wake
