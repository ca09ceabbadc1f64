"""How many runs a machine can play at a time."""

from __future__ import annotations

from collections.abc import Iterable

from fedemu.device.host.limits import this_machine
from fedemu.device.host.processors import usable_gpus
from fedemu.ops.experiment import Experiment
from fedemu.protocol.host.hardware import cores
from fedemu.protocol.wording import counted

MEMORY_OF_A_RUN = 2**30
"""Bytes that a run is expected to take. Those of the presets that run in minutes take 0.3 to 0.6 GiB."""


def default_at_once(experiments: Iterable[Experiment], device_type: str) -> tuple[int, str]:
    """How many runs this machine can play at a time, and why, in words.

    Each run computes on as many cores as its ``server.threads``. With a GPU there is one run for each.
    """
    machine = this_machine()
    if found := len(usable_gpus(device_type)):
        return found, counted(found, "GPU")
    threads = max((experiment.server.threads for experiment in experiments), default=1)
    count = cores()
    memory = machine.memory
    fit = count if memory is None else memory // MEMORY_OF_A_RUN
    free = "" if memory is None else f", {memory / 2**30:.1f} GiB free"
    return int(max(1, min(count // threads, fit))), f"{counted(count, 'core')}{free}"
