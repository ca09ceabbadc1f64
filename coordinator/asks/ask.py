"""The fate of one ask, told apart from sockets and clocks: events in, actions out.

Here is what both clocks share; ``ask_virtual.py`` and ``ask_wall.py`` decide. Real times are seconds of a monotonic
clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Accepted, Cancel, DropCause, Invalid, Late, Proceed, Scheduled, Verdict


class Give(NamedTuple):
    """Send the device its Work."""

    device: DeviceId


class Tell(NamedTuple):
    """Send the device a message that needs no frames."""

    device: DeviceId
    message: Accepted | Cancel | Invalid | Late | Proceed


Action = Give | Tell


@dataclass(frozen=True)
class Terms:
    """What an ask is decided by. ``start`` and ``deadline`` are seconds of the experiment, other times real seconds."""

    ask: AskId
    cohort: tuple[DeviceId, ...]
    wanted: int
    """How many replies end the ask."""
    start: float
    deadline: float
    give_up: float = 60.0
    answer_timeout: float = 600.0
    resend: float = 2.0
    """After how long without an answer a message is sent again; doubles up to 16 times that."""
    optional: bool = False
    """The ask is over as soon as nobody is left who could still reply, instead of at the deadline."""


class AskMachine(ABC):
    """One ask from its Work to its last outcome.

    ``end`` is None while it is open, then the time of the experiment at which it ended. ``away`` says until when
    dropped devices stay away, ``causes`` why by their own word; ``given_up`` are those that were away, or silent,
    without a plan for too long; ``perturbed`` says that such an accident decided an outcome.
    """

    def __init__(self, terms: Terms, connected: Iterable[DeviceId]) -> None:
        self.terms = terms
        self.verdicts: dict[DeviceId, Verdict] = {}
        self.away: dict[DeviceId, float] = {}
        self.causes: dict[DeviceId, DropCause] = {}
        self.given_up: set[DeviceId] = set()
        self.end: float | None = None
        self.perturbed = False
        self._members = frozenset(terms.cohort)
        self._present = set(self._members.intersection(connected))
        self._accepted: set[DeviceId] = set()
        text = str(terms.ask)
        self._proceed = Proceed(ask=text)
        self._thanks = Accepted(ask=text)
        self._late = Late(ask=text)
        self._cancel = Cancel(ask=text)

    @property
    def accepted(self) -> tuple[DeviceId, ...]:
        """The accepted devices in cohort order."""
        return tuple(device for device in self.terms.cohort if device in self._accepted)

    def counts(self) -> Counter[Verdict]:
        return Counter(self.verdicts.values())

    def check(self) -> None:
        """Raises AssertionError unless every device has at most one outcome and a closed ask left none without."""
        cohort = self._members
        assert set(self.verdicts) <= cohort, "an outcome of a device that was not asked"
        assert len(self._accepted) <= self.terms.wanted, "more accepted than wanted"
        assert self._accepted == {device for device, verdict in self.verdicts.items() if verdict == "accepted"}
        if self.end is not None:
            assert set(self.verdicts) == cohort, "a device without an outcome in a closed ask"
            assert sum(self.counts().values()) == len(cohort)

    def pending(self, device: DeviceId) -> bool:
        """Whether the device was asked and has no outcome yet."""
        return self.end is None and device not in self.verdicts and device in self._members

    @abstractmethod
    def open(self, now: float) -> list[Action]:
        """Start: gives the Work out."""

    @abstractmethod
    def expects(self, device: DeviceId) -> bool:
        """Whether a Result of this device would be judged now; otherwise it is answered or ignored unread."""

    @abstractmethod
    def result(self, device: DeviceId, now: float) -> list[Action]:
        """A good contribution, from a device that is expected to send one."""

    @abstractmethod
    def rejected(self, device: DeviceId, reason: str, detail: str, now: float) -> list[Action]:
        """A contribution that can't be used, from a device that is expected to send one."""

    @abstractmethod
    def scheduled(self, device: DeviceId, message: Scheduled, now: float) -> list[Action]: ...

    @abstractmethod
    def failed(self, device: DeviceId, now: float) -> list[Action]:
        """The device failed or declined."""

    @abstractmethod
    def joined(self, device: DeviceId, now: float) -> list[Action]:
        """The device (or its next incarnation) is connected."""

    @abstractmethod
    def left(self, device: DeviceId, now: float) -> list[Action]:
        """The device's connection is gone: it died, said Bye, or fell silent."""

    @abstractmethod
    def tick(self, now: float) -> list[Action]:
        """Time passed."""

    def _settle(self, device: DeviceId, verdict: Verdict) -> None:
        assert device not in self.verdicts, f"a second outcome for device {device}"
        self.verdicts[device] = verdict
        if verdict == "accepted":
            self._accepted.add(device)
