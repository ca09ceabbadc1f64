"""The functions of ``ops`` that the processes of a machine call by name.

``device`` itself imports nothing of ``ops``.
"""

from __future__ import annotations

from typing import Final

from fedemu.device.machine.arrival import ExperimentCode

DEVICE_CODE: Final = ExperimentCode(
    behaviours="fedemu.ops.assembly.behaviours:open_behaviours",
    trainer="fedemu.ops.assembly.trainer:open_trainer",
    prepare="fedemu.ops.assembly.agreement:prepare",
    environment="fedemu.ops.running.portable:environment",
    link="fedemu.ops.edges.link:link",
    wake="fedemu.ops.edges.link:wake",
)
