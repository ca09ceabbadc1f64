"""Planned faults: what goes wrong when one device gets one ask, as a function of (seed, device, ask)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from fedemu.device.behaviour.profile import Distribution, Fixed
from fedemu.protocol.ids import AskId
from fedemu.protocol.seeds import generator, uniforms

Drop = Literal["crash", "leave", "silence"]
ReplyKind = Literal["normal", "corrupt", "duplicate", "decline"]
Corruption = Literal["nan", "shape", "truncate"]
DROPS: tuple[Drop, ...] = ("crash", "leave", "silence")
REPLIES: tuple[ReplyKind, ...] = ("corrupt", "duplicate", "decline")
MINUTE = Fixed(60.0)
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class FaultRates:
    """The probability of each fault, per device and ask.

    Crash, leave and silence exclude each other, and so do corrupt, duplicate and decline. ``downtime`` is in seconds.
    """

    crash: float = 0.0
    leave: float = 0.0
    silence: float = 0.0
    corrupt: float = 0.0
    duplicate: float = 0.0
    decline: float = 0.0
    corruptions: tuple[Corruption, ...] = ("nan", "shape", "truncate")
    downtime: Distribution = MINUTE

    @cached_property
    def any(self) -> bool:
        """Whether any fault is possible."""
        return any((self.crash, self.leave, self.silence, self.corrupt, self.duplicate, self.decline))


@dataclass(frozen=True)
class FaultPlan:
    """The faults of one device in one ask.

    ``drop`` happens after ``fraction`` of the work's duration, and the device is away for ``downtime`` seconds.
    """

    drop: Drop | None = None
    fraction: float = 1.0
    downtime: float = 0.0
    reply: ReplyKind = "normal"
    corruption: Corruption | None = None


NO_FAULTS = FaultPlan()


def plan(rates: FaultRates, seed: int, device: int, ask: AskId) -> FaultPlan:
    """The faults of a device in an ask.

    All numbers are drawn in one fixed order. So a device that has a fault at a low rate also has it at a higher rate.
    """
    if not rates.any:
        return NO_FAULTS
    purpose = f"faults/{ask.attempt}/{ask.ordinal}"
    chance, fraction, reply_chance, choice = uniforms(4, seed, round=ask.round, device=device, purpose=purpose)
    drop = _pick(chance, DROPS, (rates.crash, rates.leave, rates.silence))
    reply = _pick(reply_chance, REPLIES, (rates.corrupt, rates.duplicate, rates.decline))
    corruption = rates.corruptions[int(choice * len(rates.corruptions))] if reply == "corrupt" else None
    downtime = 0.0
    if drop is not None:
        random = generator(seed, round=ask.round, device=device, purpose=purpose)
        random.random(4)
        downtime = rates.downtime.draw(random)
    return FaultPlan(drop, fraction if drop else 1.0, downtime, reply or "normal", corruption)


def _pick(chance: float, kinds: Sequence[Kind], rates: Sequence[float]) -> Kind | None:
    """The kind whose stretch of [0, 1) holds ``chance``; None if no stretch does. A stretch is as long as its rate."""
    edge = 0.0
    for kind, rate in zip(kinds, rates, strict=True):
        edge += rate
        if chance < edge:
            return kind
    return None
