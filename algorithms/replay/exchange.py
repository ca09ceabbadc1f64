"""What devices and the coordinator settle before devices select, in one form for every strategy that does so."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from fedemu.algorithms.interface import Ask, Context, Forest, Memory, Query, Reply, Tree
from fedemu.protocol.ids import DeviceId

EACH: Final = "each"
"""The key under which a device finds the tree that it got and no other device."""
_PERIOD: Final = "period"


@dataclass(frozen=True)
class Settled:
    """What devices get to select with: trees ``shared`` by all, and a tree of ``each`` device. ``remarks`` are told."""

    shared: Forest
    each: Mapping[DeviceId, Tree] | None
    remarks: Mapping[str, Any]


class Exchange(Protocol):
    """The exchange before a selection."""

    @property
    def programs(self) -> Mapping[str, Query]:
        """What devices are asked, by name."""
        ...

    def play(self, shared: Forest, context: Context) -> Generator[Ask, Reply, Settled]:
        """Ask the devices that are on-line. ``shared`` has the global model and the mark of the period."""
        ...


def marked(period: int) -> Forest:
    """A tree that names the period of an exchange. It means nothing to a device that selects from another period."""
    return {_PERIOD: {_PERIOD: torch.tensor([period])}}


def is_of(memory: Memory, shared: Forest) -> bool:
    """Whether what was sent belongs to the exchange about the period from which the device selects."""
    return _PERIOD in shared and int(shared[_PERIOD][_PERIOD]) == memory.period
