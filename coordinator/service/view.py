"""What a coordinator knows of each device at this moment, for people who watch. Nothing is changed by looking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from fedemu.coordinator.service.service import Service

Doing = Literal["absent", "online", "asked", "training", "uploading", "away", "crashed"]


class FleetView:
    """Looks at a service. All of it runs on the event loop of the coordinator."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def states(self, code: Callable[[Doing], int]) -> bytes:
        """A byte for each device: the code of what it does.

        A device is ``asked`` until it may proceed, then ``training`` until its reply is here, then ``uploading`` until
        the ask ends, because its reply takes the time of the experiment up to then.
        """
        roster, time = self._service.roster, self._service.timeline.time
        absent, online, away, crashed = (code(doing) for doing in ("absent", "online", "away", "crashed"))
        columns, here = roster.columns, roster.here()
        came = columns.incarnation >= 0 if roster.planned is None else here
        states = np.where(roster.online(time) & (columns.away <= time), online, away).astype(np.uint8)
        states[~came] = absent
        cut_off = came & ~here
        cut_off[list(roster.departed)] = False
        if self._service.reception.stopping is not None:  # all devices leave
            cut_off[:] = False
        states[columns.lost | cut_off] = crashed
        exchange = self._service.reception.exchange
        if exchange is not None:
            machine = exchange.machine
            asked, training, uploading = (code(doing) for doing in ("asked", "training", "uploading"))
            for device in machine.terms.cohort:
                verdict = machine.verdicts.get(device)
                if verdict == "accepted":
                    states[device] = uploading
                elif verdict is None and states[device] != crashed:
                    states[device] = training if machine.expects(device) else asked
        return states.tobytes()

    def facts(self) -> dict[str, Any]:
        """The open ask, the counts of the fleet, and the devices that are waited for, in the form of JSON."""
        service = self._service
        exchange, absence = service.reception.exchange, service.waits.absence(service.timeline.now())
        ask: dict[str, Any] | None = None
        if exchange is not None:
            machine = exchange.machine
            ask = {
                "ask": exchange.text,
                "program": exchange.parts.program,
                "start": machine.terms.start,
                "asked": len(machine.terms.cohort),
                "wanted": machine.terms.wanted,
                "counts": dict(machine.counts()),
            }
        missing = None
        if absence is not None:
            missing = {name: getattr(absence, name) for name in ("devices", "connected", "seconds", "then", "away")}
        return {
            "virtual_time": service.timeline.time,
            "wall_time": service.timeline.spent,
            "counts": dict(service.counts()),
            "wire": service.traffic(),
            "ask": ask,
            "absence": missing,
        }
