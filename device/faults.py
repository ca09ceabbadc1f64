"""Planned misbehaviour: what goes wrong with one request to one device, a function of (seed, device, ask)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

from fedemu.device.profile import Distribution, Fixed
from fedemu.protocol.ids import AskId
from fedemu.protocol.seeds import generator

Drop = Literal["crash", "leave", "silence"]
ReplyKind = Literal["normal", "corrupt", "duplicate", "decline"]
Corruption = Literal["nan", "shape", "truncate"]
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class FaultRates:
    """Probabilities per request. Crash, leave and silence exclude each other, and so do corrupt, duplicate and decline."""

    crash: float = 0.0
    leave: float = 0.0
    silence: float = 0.0
    corrupt: float = 0.0
    duplicate: float = 0.0
    decline: float = 0.0
    corruptions: tuple[Corruption, ...] = ("nan", "shape", "truncate")
    downtime: Distribution = Fixed(60.0)

    @property
    def any(self) -> bool:
        return any((self.crash, self.leave, self.silence, self.corrupt, self.duplicate, self.decline))


@dataclass(frozen=True)
class FaultPlan:
    """``drop`` happens after ``fraction`` of the work's duration and takes the device away for ``downtime`` seconds."""

    drop: Drop | None = None
    fraction: float = 1.0
    downtime: float = 0.0
    reply: ReplyKind = "normal"
    corruption: Corruption | None = None


def plan(rates: FaultRates, seed: int, device: int, ask: AskId) -> FaultPlan:
    """Draws in one fixed order, so that a higher rate of one fault keeps the devices that a lower rate had."""
    if not rates.any:
        return FaultPlan()
    random = generator(seed, round=ask.round, device=device, purpose=f"faults/{ask.attempt}/{ask.ordinal}")
    chance, fraction, reply_chance, choice = random.random(4)
    drop = _pick(chance, (("crash", rates.crash), ("leave", rates.leave), ("silence", rates.silence)))
    reply = _pick(
        reply_chance, (("corrupt", rates.corrupt), ("duplicate", rates.duplicate), ("decline", rates.decline))
    )
    corruption = rates.corruptions[int(choice * len(rates.corruptions))] if reply == "corrupt" else None
    downtime = rates.downtime.draw(random) if drop else 0.0
    return FaultPlan(drop, float(fraction) if drop else 1.0, downtime, reply or "normal", corruption)


def _pick(chance: float, rates: tuple[tuple[Kind, float], ...]) -> Kind | None:
    """The fault whose stretch of [0, 1) holds ``chance``."""
    edge = 0.0
    for kind, rate in rates:
        edge += rate
        if chance < edge:
            return kind
    return None
