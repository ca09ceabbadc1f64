"""The devices that an ask names, in its ``cohort`` and in ``each``."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from fedemu.algorithms.interface import Ask
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import DeviceId


def named_devices(ask: Ask, devices: int) -> tuple[DeviceId, ...] | None:
    """The devices that ``cohort`` names, each once; None if it names none by number.

    Raises ConfigurationError if ``cohort`` or ``each`` has anything but devices of a fleet of so many.
    """
    _require_in_fleet(ask, "each", ask.each or (), devices)
    if isinstance(ask.cohort, str):
        return None
    named = tuple(dict.fromkeys(_numbers(ask)))
    _require_in_fleet(ask, "cohort", named, devices)
    if not named and not ask.optional:
        raise ConfigurationError(f"{ask.field('cohort')} names no device; name one, or make the Ask optional")
    return named


def _numbers(ask: Ask) -> Iterator[DeviceId]:
    """The devices in ``cohort``. Those of numpy become numbers of Python, which messages and checkpoints can hold.

    Raises ConfigurationError for anything but whole numbers, such as a mask.
    """
    devices: Any = ask.cohort
    for device in devices:
        try:
            if isinstance(device, bool | np.bool_) or getattr(device, "dtype", None) == torch.bool:
                raise TypeError
            yield DeviceId(operator.index(device))
        except TypeError:
            raise ConfigurationError(
                f"{ask.field('cohort')} has {device!r}; it must be a list of devices, which are whole numbers from 0"
            ) from None


def _require_in_fleet(ask: Ask, field: str, named: Iterable[int], devices: int) -> None:
    for device in named:
        if not 0 <= device < devices:
            raise ConfigurationError(
                f"{ask.field(field)} names device {device}; the devices of this fleet are 0 to {devices - 1}"
            )
