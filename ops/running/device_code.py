"""The functions of ``ops`` that the processes of a machine call by name.

``device`` itself imports nothing of ``ops``.
"""

from __future__ import annotations

from typing import Final

from fedemu.device.machine.arrival import ExperimentCode, Ways
from fedemu.ops.experiment import Experiment
from fedemu.ops.running.portable import environment_for

DEVICE_CODE: Final = ExperimentCode(
    behaviours="fedemu.ops.assembly.behaviours:open_behaviours",
    trainer="fedemu.ops.assembly.trainer:open_trainer",
    prepare="fedemu.ops.assembly.agreement:prepare",
    ways="fedemu.ops.running.device_code:ways",
)


def ways(experiment: bytes) -> Ways:
    """What an experiment in bytes wants of a machine."""
    wanted = Experiment.from_bytes(experiment)
    fleet = wanted.fleet
    return Ways(environment_for(wanted), fleet.link == "shared", fleet.wake == "on-demand")
