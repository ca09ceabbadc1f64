"""Why a round had too few replies: what became of the devices that were asked, and what to do about it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fedemu.coordinator.asks.exchange import Exchange
from fedemu.coordinator.settings import Settings


@dataclass
class Shortfall:
    """What became of the devices that were asked in vain, over all tries of a round.

    ``most_asked`` is the size of the largest cohort. ``given_up`` devices had no connection, or were silent, for
    ``fleet.give_up``. ``failures`` and ``rejections`` count devices by the reason that was told. ``forgotten`` devices
    had own states as the round began, which are gone.
    """

    needed: int = 0
    most_asked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    given_up: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    forgotten: int = 0

    @classmethod
    def of(cls, exchange: Exchange, needed: int) -> Shortfall:
        """That of one ask, which needed this number of replies."""
        machine = exchange.machine
        return cls(
            needed,
            len(machine.terms.cohort),
            Counter(machine.verdicts.values()),
            len(machine.given_up),
            Counter(exchange.failures),
            Counter(exchange.rejections),
            exchange.forgotten,
        )

    def add(self, other: Shortfall) -> None:
        """Count another try, too."""
        self.needed = other.needed
        self.most_asked = max(self.most_asked, other.most_asked)
        self.given_up += other.given_up
        self.forgotten += other.forgotten
        for mine, more in (
            (self.outcomes, other.outcomes),
            (self.failures, other.failures),
            (self.rejections, other.rejections),
        ):
            mine.update(more)

    @property
    def accepted(self) -> int:
        """The number of replies that were accepted."""
        return self.outcomes["accepted"]

    @property
    def exploded(self) -> int:
        """The number of replies that were rejected because their values are not finite, or beyond the largest norm.

        A model that diverges step by step exceeds the largest norm before it stops being finite.
        """
        return self.rejections["nonfinite"] + self.rejections["norm"]

    @property
    def diverged(self) -> bool:
        """Whether enough replies came in one try, if those count that have exploded."""
        return self.accepted + self.exploded >= self.needed

    @property
    def failure(self) -> str | None:
        """The reason that failed devices told most often. None unless most of the devices that were lost failed."""
        return self.failures.most_common(1)[0][0] if self._cause == "failures" else None

    def advice(self, settings: Settings) -> str:
        """What happened to most of the devices, with their numbers, and what to do. A part of a sentence."""
        advice = self._advice(settings)
        return advice if self._cause in _BY_ACCIDENT else f"{advice} (in a new run: a resumed one keeps its settings)"

    def _advice(self, settings: Settings) -> str:
        asked = self.outcomes.total()
        match self._cause:
            case "nobody":
                return "no device was connected; start devices with fedemu device, and go on with --resume"
            case "given_up":
                return (
                    f"{_of(self.given_up, asked)} had no connection, or were silent, for {settings.give_up:g} s "
                    "(fleet.give_up); start the devices again, and go on with --resume"
                )
            case "failures":
                reason, count = self.failures.most_common(1)[0]
                total = self.failures.total()
                if count == total == asked:
                    return f"all devices failed, {count} times for one reason: {reason}"
                often = "for one reason" if count == total else f"{count} of them for this reason"
                return f"{_of(total, asked)} failed, {often}: {reason}"
            case "rejected":
                reason, count = self.rejections.most_common(1)[0]
                return (
                    f"{_of(self.outcomes['rejected'], asked)} sent replies that were rejected, most often as "
                    f"{reason!r} ({count}); docs/protocol.md explains the reasons"
                )
            case "declined":
                return (
                    f"{_of(self._declined, asked)} declined or failed by plan; lower the rates of [faults], ask more "
                    f"devices (fleet.over_selection = {settings.over_selection:g}), or lower fleet.quorum"
                )
            case "few":
                return (
                    f"at most {self.most_asked} devices were there to be asked; make [availability] last longer, or "
                    f"lower fleet.per_round = {settings.per_round} or fleet.quorum = {settings.quorum:g}"
                )
            case "late":
                return (
                    f"{_of(self.outcomes['late'], asked)} were late; lengthen fleet.deadline = {settings.deadline:g}, "
                    "or make the devices of [profile] faster"
                )
            case "dropped":
                return (
                    f"{_of(self.outcomes['dropped'], asked)} dropped out before they replied; ask more devices "
                    f"(fleet.over_selection = {settings.over_selection:g}), or lower fleet.quorum = {settings.quorum:g}"
                )
        return "ask more devices, lengthen fleet.deadline, or lower fleet.quorum"

    @property
    def _declined(self) -> int:
        return max(0, self.outcomes["failed"] - self.given_up - self.failures.total())

    @property
    def _cause(self) -> str:
        """How most of the devices without an accepted reply were lost."""
        if not self.outcomes.total():
            return "nobody"
        causes = {
            "given_up": self.given_up,
            "failures": self.failures.total(),
            "rejected": self.outcomes["rejected"],
            "declined": self._declined,
            "late": self.outcomes["late"],
            "dropped": self.outcomes["dropped"],
        }
        cause = max(causes, key=lambda name: causes[name])
        by_accident = cause in _BY_ACCIDENT and causes[cause] > 0
        if self.most_asked < self.needed and not by_accident:
            return "few"
        return cause if causes[cause] else ""


_BY_ACCIDENT = ("nobody", "given_up", "failures", "rejected")
"""The causes for which no setting of the experiment is to blame."""


def _of(count: int, asked: int) -> str:
    """How many devices of all that were asked. A device that was asked in several tries counts in each."""
    if count == asked:
        return "all devices that were asked"
    return f"{count} of {asked} devices that were asked (all tries)"
