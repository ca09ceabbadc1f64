"""Toy functions for the processes under test, which are named by this file's path. They need no torch and no data."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedemu.device.behaviour.behaviour import Assignment, Schedule
from fedemu.protocol.code.named import load
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import Digest, digest_of

if TYPE_CHECKING:
    from fedemu.device.machine.arrival import Ways

DATA = digest_of(b"toy data")


def prepare(experiment: bytes) -> Digest:
    """The digest that the toy coordinator expects, or the one that the experiment sets."""
    settings = json.loads(experiment)
    if "prepare" in settings:
        raise ConfigurationError(settings["prepare"])
    return Digest(settings.get("data", DATA))


def ways(experiment: bytes) -> Ways:
    from fedemu.device.machine.arrival import Ways  # device processes import this file, too, and need no machine

    return Ways({}, shares_link=False, sleeping=False)


class ToyBehaviour:
    """A device that is always on-line. It finishes at start + 1 + device, or drops out for the cause in
    ``drops["round.device"]``."""

    def __init__(self, settings: Mapping[str, Any], device: int) -> None:
        self._drops = settings.get("drops", {})
        self._device = device

    def presence(self, until: float, since: float = 0.0) -> tuple[tuple[float, float], ...]:
        return ((0.0, math.inf),)

    def schedule(self, assignment: Assignment) -> Schedule:
        cause = self._drops.get(f"{assignment.ask.round}.{self._device}")
        if cause is not None:
            return Schedule("drop", assignment.start + 0.5, cause, assignment.start + 10.0)
        return Schedule("finish", assignment.start + 1.0 + self._device)


def open_behaviours(experiment: bytes) -> Callable[[int], ToyBehaviour]:
    settings = json.loads(experiment)
    if settings.get("broken_behaviours"):
        raise ConfigurationError("These behaviours can't be opened.")
    if named := settings.get("named"):
        load(named)

    def open_behaviour(device: int) -> ToyBehaviour:
        if device in settings.get("cursed", ()):
            raise ValueError("cursed")
        return ToyBehaviour(settings, device)

    return open_behaviour


def train_like_a_toy(settings: Mapping[str, Any], device: int, round: int, indices: Sequence[int], own: float) -> float:
    """The toy trainer's result of a job: a number that depends on everything that a job carries."""
    return float(sum(indices) + 1000 * device + round + own + settings.get("shift", 0))


def maybe_hang(settings: Mapping[str, Any]) -> None:
    """Never start, if ``hangs`` is a file that does not exist: the first start makes it.

    Its suffix tells how: ``.asleep`` uses no processor time, ``.awake`` uses all.
    """
    if "hangs" in settings and not (marker := Path(settings["hangs"])).exists():
        marker.touch()
        while True:
            time.sleep(3600.0 if marker.suffix == ".asleep" else 0.0)


def maybe_die(settings: Mapping[str, Any], device: int) -> None:
    """Spend ``slow`` seconds on a job, and kill this process if the job is that of device ``killer``.

    ``spins`` is a file that does not exist: the first job makes it, and never ends.
    """
    if "spins" in settings and not Path(settings["spins"]).exists():
        Path(settings["spins"]).touch()
        while True:
            pass
    if settings.get("killer") == device:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(settings.get("slow", 0.0))
