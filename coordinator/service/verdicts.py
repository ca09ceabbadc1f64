"""What was decided of recent asks, to answer what comes too late or again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Duplicate, Late, Verdict

REMEMBERED = 64
"""Asks whose outcomes are kept."""


class Verdicts:
    """The outcomes of the last asks, by (device, ask)."""

    def __init__(self) -> None:
        self._asks: OrderedDict[str, Mapping[DeviceId, Verdict]] = OrderedDict()

    def remember(self, ask: AskId, verdicts: Mapping[DeviceId, Verdict]) -> None:
        self._asks[str(ask)] = verdicts
        while len(self._asks) > REMEMBERED:
            self._asks.popitem(last=False)

    def answer(self, ask: str, device: DeviceId) -> Duplicate | Late:
        """What a device hears that sends a result for an ask which is not open."""
        verdict = self._asks.get(ask, {}).get(device)
        return Late(ask=ask) if verdict is None else Duplicate(ask=ask, verdict=verdict)
