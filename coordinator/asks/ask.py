"""How one ask is decided, without sockets and clocks: events go in, actions come out.

This file holds the part that both kinds of clock share. The decisions are in ``virtual.py`` and ``wall.py``. Real
times are seconds of a monotonic clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Accepted, Cancel, DropCause, Invalid, Late, Proceed, Scheduled, Verdict

LIVES = 20
"""A device is given up if it comes back more often than this in one ask, or if edges lose its replies more often."""


class Missed(NamedTuple):
    """What a device was given up for: what it ``lacked``, in words, for how many real seconds, and by which limit."""

    lacked: str
    seconds: float
    limit: str


class Give(NamedTuple):
    """An action: send the device its Work."""

    device: DeviceId


class Tell(NamedTuple):
    """An action: send the device a message that needs no frames."""

    device: DeviceId
    message: Accepted | Cancel | Invalid | Late | Proceed


Action = Give | Tell


@dataclass(frozen=True)
class Terms:
    """The rules of one ask. ``start`` and ``deadline`` are seconds of the experiment, other times are real seconds."""

    ask: AskId
    cohort: tuple[DeviceId, ...]
    wanted: int
    """The number of replies that ends the ask."""
    start: float
    deadline: float
    give_up: float = 60.0
    answer_timeout: float = 600.0
    resend: float = 2.0
    """A message without an answer is sent again after this time. The time doubles each time, up to 16 times."""
    optional: bool = False
    """If true, the ask is over as soon as nobody is left who could still reply. Otherwise it waits for the deadline."""


class AskMachine(ABC):
    """One ask from its Work to its last outcome.

    ``verdicts`` holds the outcomes. ``end`` is None while the ask is open, then the time of the experiment at which it
    ended. ``away`` holds the time until which each dropped device stays away, and ``causes`` why devices
    dropped out, as far as it is known. ``given_up`` are the devices that were away or silent for too long, and not by
    plan, each with what was waited for. ``perturbed`` says that an unplanned failure decided an outcome.
    """

    def __init__(self, terms: Terms, connected: Iterable[DeviceId]) -> None:
        self.terms = terms
        self.verdicts: dict[DeviceId, Verdict] = {}
        self.away: dict[DeviceId, float] = {}
        self.causes: dict[DeviceId, DropCause] = {}
        self.given_up: dict[DeviceId, Missed] = {}
        self.end: float | None = None
        self.perturbed = False
        self._members = frozenset(terms.cohort)
        self._present = set(self._members.intersection(connected))
        self._accepted = 0
        """The number of accepted devices."""
        text = str(terms.ask)
        self._proceed = Proceed(ask=text)
        self._thanks = Accepted(ask=text)
        self._late = Late(ask=text)
        self._cancel = Cancel(ask=text)

    @property
    def accepted(self) -> tuple[DeviceId, ...]:
        """The accepted devices in cohort order."""
        return tuple(device for device in self.terms.cohort if self.verdicts.get(device) == "accepted")

    def counts(self) -> Counter[Verdict]:
        """The number of devices by outcome."""
        return Counter(self.verdicts.values())

    def times(self) -> Mapping[DeviceId, float]:
        """When devices finished or dropped out, in seconds of the experiment, as far as it is known."""
        return {}

    def check(self) -> None:
        """Raise AssertionError if the outcomes are not those of an ask: one for each device once the ask is closed."""
        assert self.verdicts.keys() <= self._members, "an outcome of a device that was not asked"
        assert self._accepted <= self.terms.wanted, "more accepted than wanted"
        if self.end is not None:
            assert self.verdicts.keys() == self._members, "a device without an outcome in a closed ask"

    def pending(self, device: DeviceId) -> bool:
        """Whether the device was asked and has no outcome yet."""
        return self.end is None and device not in self.verdicts and device in self._members

    @property
    def running(self) -> Collection[DeviceId]:
        """The devices whose results are awaited, if that is settled before they reply (virtual clock)."""
        return ()

    def awaited(self, now: float) -> tuple[int, float, float] | None:
        """The devices without a connection for which the ask waits.

        Their number, for how long the ask has waited for the first of them, and how long it still waits for the last.
        None if there are none.
        """
        return None

    def stalled(self, seconds: float) -> None:
        """The coordinator stood still for so long. This time does not count for a device that is waited for."""
        return

    def kept(self, device: DeviceId, now: float) -> None:
        """A good contribution of a device in ``running`` is at an edge. Nothing is awaited of the device meanwhile."""
        return

    def lost(self, device: DeviceId, now: float) -> list[Action]:
        """What was ``kept`` is lost, so the device is asked again."""
        return []

    def underway(self, device: DeviceId, now: float) -> None:
        """Something that a device in ``running`` needs, or its result, is on its way over a slow connection."""
        return

    @abstractmethod
    def open(self, now: float) -> list[Action]:
        """Start the ask, and give the Work out."""

    @abstractmethod
    def expects(self, device: DeviceId) -> bool:
        """Whether a Result of this device would be judged now. If not, it is not read."""

    @abstractmethod
    def result(self, device: DeviceId, now: float) -> list[Action]:
        """A good contribution came from a device that is expected to send one."""

    @abstractmethod
    def rejected(self, device: DeviceId, reason: str, detail: str, now: float) -> list[Action]:
        """A contribution that cannot be used came from a device that is expected to send one."""

    @abstractmethod
    def scheduled(self, device: DeviceId, message: Scheduled, now: float) -> list[Action]:
        """The device says when it will finish, or drop out."""

    @abstractmethod
    def failed(self, device: DeviceId, now: float) -> list[Action]:
        """The device failed or declined."""

    @abstractmethod
    def joined(self, device: DeviceId, now: float) -> list[Action]:
        """The device or its next incarnation is connected."""

    @abstractmethod
    def left(self, device: DeviceId, now: float, cause: DropCause | None = None) -> list[Action]:
        """The device is no longer connected: it died, said Bye, or fell silent. ``cause`` is None if nobody knows."""

    @abstractmethod
    def tick(self, now: float) -> list[Action]:
        """Time passed."""

    def give_up(self, device: DeviceId, missed: Missed, now: float) -> list[Action]:
        """Nobody waits for the device any longer, and not by plan."""
        self.perturbed = True
        self.given_up[device] = missed
        return self.failed(device, now)

    def _settle(self, device: DeviceId, verdict: Verdict) -> None:
        assert device not in self.verdicts, f"a second outcome for device {device}"
        self.verdicts[device] = verdict
        self._accepted += verdict == "accepted"

    def _settle_rest(self, verdict: Literal["late", "cancelled"]) -> list[Action]:
        """Give this outcome to every device that does not run and has no outcome yet."""
        message = self._late if verdict == "late" else self._cancel
        rest = [device for device in self.terms.cohort if device not in self.verdicts and device not in self.running]
        for device in rest:
            self._settle(device, verdict)
        return [Tell(device, message) for device in rest]
