"""What each device of a run does, one byte for each: from the coordinator's own account, or else from its events."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, Final

from fedemu.ops.watching.feed import States

LETTERS: Final = "acldfr"
"""The outcomes of asks in ``asks.jsonl``: accepted, cancelled, late, dropped, failed, rejected."""
NO_OUTCOME: Final = len(LETTERS)
_SHARE: Final = 4
"""If more than one in so many devices changed, all states are sent."""


class Devices:
    """The devices as the page colours them: by what they do now, and by their last outcome.

    ``visits`` counts the asks of each. ``virtual`` says whether the experiment has a clock of its own.
    """

    def __init__(self, count: int, virtual: bool) -> None:
        self._virtual = virtual
        self._followed = bytearray(count)
        """What each device does as the logs tell it."""
        self._told = b""
        """The coordinator's own account. Empty without one."""
        self.outcomes = bytearray([NO_OUTCOME]) * count
        self.visits = [0] * count
        self.frozen: set[int] = set()
        """The devices whose processes are stopped by the page."""
        self._back: dict[int, tuple[float, int]] = {}
        self._sent = (bytes(count), bytes(self.outcomes))

    def __len__(self) -> int:
        return len(self.outcomes)

    @property
    def states(self) -> bytes:
        """What each device does, as the coordinator tells it, or else as the logs do."""
        if not self._told:
            return bytes(self._followed)
        states = bytearray(self._told)
        # The coordinator does not tell why a device is away. Its events do, also those before it was started again.
        for device, (_, cause) in self._back.items():
            if cause == States.CRASHED and states[device] == States.AWAY:
                states[device] = cause
        return bytes(states)

    def happened(self, event: Mapping[str, Any]) -> None:
        """An event of ``events.jsonl``. It tells what its device does, unless the coordinator tells it."""
        device, name = event.get("device"), event.get("event")
        if not isinstance(device, int) or not 0 <= device < len(self):
            return
        self._returned(device, event.get("virtual_time") or 0.0)
        if name == "dropout":
            # Under the wall clock nobody knows when it is back, and an event has told before that it has gone.
            back = event.get("back")
            if back is None and self._virtual:
                back = math.inf  # it never is
            if isinstance(back, int | float):
                self._back[device] = (float(back), States.CRASHED if event.get("cause") == "crash" else States.AWAY)
                self._followed[device] = self._back[device][1]
        elif name == "join":
            away = self._back.get(device)
            self._followed[device] = States.ONLINE if away is None else away[1]
        elif name in ("death", "closed") and device not in self._back:
            self._followed[device] = States.CRASHED
        elif name in ("leave", "silence", "revoked"):
            self._followed[device] = States.AWAY

    def reached(self, time: float) -> None:
        """The experiment's clock shows ``time``: some devices are back."""
        for device in list(self._back):
            self._returned(device, time)

    def _returned(self, device: int, time: float) -> None:
        """A device that was away is back if its time has come."""
        if device in self._back and self._back[device][0] <= time:
            del self._back[device]
            if self._followed[device] in (States.AWAY, States.CRASHED):
                self._followed[device] = States.ONLINE

    def told(self, states: bytes) -> None:
        """The coordinator's own account of all devices. Empty if there is none any more: then the events count."""
        self._told = states if len(states) == len(self) else b""

    def asked(self, ask: Mapping[str, Any]) -> None:
        """A line of ``asks.jsonl``."""
        for device, letter in zip(ask.get("devices", ()), ask.get("outcomes", ""), strict=False):
            if isinstance(device, int) and 0 <= device < len(self):
                self.visits[device] += 1
                if self._followed[device] == States.ABSENT:  # no event tells of the coming of one that sleeps
                    self._followed[device] = States.ONLINE
                place = LETTERS.find(letter)
                self.outcomes[device] = NO_OUTCOME if place < 0 else place

    def shown(self) -> bytes:
        """The states with the frozen devices among them."""
        if not self.frozen:
            return self.states
        states = bytearray(self.states)
        for device in self.frozen:
            if device < len(states):  # a supervisor tells its devices, whatever the experiment in the folder says
                states[device] = States.FROZEN
        return bytes(states)

    def whole(self) -> dict[str, Any]:
        """All devices, for a viewer who comes new."""
        return {
            "states": _text(self.shown()),
            "outcomes": _text(bytes(self.outcomes)),
            "visits": list(self.visits),
        }

    def changes(self) -> dict[str, Any]:
        """What changed since the last call. Empty if nothing did."""
        states, outcomes = self.shown(), bytes(self.outcomes)
        before, self._sent = self._sent, (states, outcomes)
        if self._sent == before:
            return {}
        both = zip(zip(states, outcomes, strict=True), zip(*before, strict=True), strict=True)
        changed = [device for device, (now, then) in enumerate(both) if now != then]
        if len(changed) * _SHARE > len(states):
            return {"states": _text(states), "outcomes": _text(outcomes)}
        return {
            "at": changed,
            "states": _text(bytes(states[device] for device in changed)),
            "outcomes": _text(bytes(outcomes[device] for device in changed)),
        }


def _text(values: bytes) -> str:
    return base64.b64encode(values).decode()
