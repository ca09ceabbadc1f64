"""An edge's own connection further up: its place there, its heartbeats, and what it does while nobody answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from fedemu.coordinator.edge.plan import LARGEST, EdgePlan
from fedemu.protocol import messages as wire
from fedemu.protocol.codec import Buffer, Envelope
from fedemu.protocol.errors import FedemuError, HandshakeFailed, ProtocolError, RefusedError, UnreachableError
from fedemu.protocol.sharing import edge_messages as edge
from fedemu.protocol.sharing.trunk import Owner, Trunk

AGAIN_SECONDS = 2.0
"""The time after which an edge asks for its place again, and the longest time between two of its heartbeats."""
SOON_SECONDS = 0.25
"""The time after which it asks again if its place there is lost."""


class Upward:
    """Keeps the edge's place further up on the ``trunk``, by the addresses and times of its plan.

    Calls ``placed`` whenever the edge has got its place, with what it was told now and before, ``heard`` with every
    other message, and ``failed`` with an error after which the edge cannot go on.
    """

    def __init__(
        self,
        plan: EdgePlan,
        trunk: Trunk,
        now: Callable[[], float],
        placed: Callable[[edge.Stationed, edge.Stationed | None], None],
        heard: Callable[[Envelope], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.stationed: edge.Stationed | None = None
        """What the edge was told with its place. None before it has had one."""
        self._plan = plan
        self._trunk = trunk
        self._now = now
        self._decoder = edge.down_decoder(LARGEST)
        self._placed = placed
        self._hear = heard
        self._failed = failed
        self._dealer: Owner | None = None
        self._before = (0, 0)
        """The bytes of the connections before this one."""
        self._away = False
        """Whether people were told that the coordinator is gone."""
        self._began = self._heard = self._connected = now()
        self._asked = self._beat = -math.inf
        self._barred, self._anew = "", False
        trunk.heard = self._lives

    @property
    def traffic(self) -> tuple[int, int]:
        """The bytes that were sent and received so far, on all connections together."""
        sent, received = self._before
        dealer = self._dealer
        return (sent, received) if dealer is None else (sent + dealer.bytes_sent, received + dealer.bytes_received)

    def connect(self) -> None:
        """Connect anew, and ask for a place."""
        if self._dealer is not None:
            self._dealer.close()
            self._before = self.traffic
        self._connected, self._anew = self._now(), False
        self._dealer = self._trunk.connect(self._plan.up, self._decoder, self._received, self._rejected)
        self._ask(self._connected)

    def say(self, message: wire.Message, frames: Sequence[Buffer] = ()) -> None:
        """Send a message for the edge itself."""
        if self._dealer is not None:
            self._dealer.send(message, frames)

    def stood_still(self, seconds: float, now: float) -> None:
        """The edge itself stood still for so long, which does not count as silence of others."""
        self._began += seconds
        self._heard = min(self._heard + seconds, now)

    def tick(self, now: float) -> None:
        """Beat, ask for the place again, connect anew, or give up, if it is time for that."""
        plan = self._plan
        if self.stationed is None and now >= self._began + plan.connect_seconds:
            self._failed(self._never_stationed())
        elif self.stationed is not None and now >= self._heard + plan.lost_seconds:
            self._failed(
                UnreachableError(
                    f"The coordinator at {plan.up} has been away for {plan.lost_seconds:g} s, so this edge has "
                    "stopped; start it again once it is back."
                )
            )
        elif self.stationed is not None and now >= max(self._heard, self._connected) + _expiry(self.stationed):
            if not self._away:
                self._away = True
                left = self._heard + plan.lost_seconds - now
                plan.told(f"the coordinator is gone; this edge looks for it for {left:.0f} s")
            self.connect()
        elif not self._trunk.open and now >= self._asked + AGAIN_SECONDS:
            if self._anew:
                self.connect()
            else:
                self._ask(now)
        elif self._trunk.open and now >= self._beat and self.stationed is not None:
            self._beat = now + min(AGAIN_SECONDS, self.stationed.heartbeat_seconds)
            self.say(wire.Heartbeat())

    def _never_stationed(self) -> UnreachableError | RefusedError:
        plan = self._plan
        if self._barred:
            return RefusedError.shut_out(edge.NO_EDGE, plan.connect_seconds, self._barred)
        return UnreachableError.unanswered(plan.up, plan.connect_seconds)

    def _ask(self, now: float) -> None:
        self._asked = now
        self.say(edge.Station(host=self._plan.host))

    def _lives(self) -> None:
        self._heard = self._now()

    def _received(self, envelope: Envelope) -> None:
        now = self._heard = self._now()
        try:
            match envelope.message:
                case edge.Stationed() as stationed:
                    self._take_place(stationed, now)
                case wire.Refused() as refused if refused.reason != "unknown_blob":
                    self._refused(refused, now)
                case _:
                    self._hear(envelope)
        except FedemuError as error:
            self._failed(error)

    def _take_place(self, stationed: edge.Stationed, now: float) -> None:
        if self.stationed is None:
            self._plan.told(f"an edge of {stationed.run}")
        elif self._away:
            self._plan.told("the coordinator is back")
        self._away, self._barred = False, ""
        self._beat = now + stationed.heartbeat_seconds
        before, self.stationed = self.stationed, stationed
        self._placed(stationed, before)

    def _refused(self, refused: wire.Refused, now: float) -> None:
        match refused.reason:
            case "malformed" | "version" if self.stationed is None:
                self._failed(RefusedError.misunderstood(self._plan.up, refused.detail))
            case "unknown_peer" | "malformed":
                self._asked = min(self._asked, now - AGAIN_SECONDS + SOON_SECONDS)
            case edge.NO_EDGE if self.stationed is None:
                self._bar(f"the coordinator at {self._plan.up} takes no edge from here: {refused.detail}")
            case reason:
                self._failed(RefusedError(reason, f"The coordinator at {self._plan.up} refused: {refused.detail}"))

    def _rejected(self, error: ProtocolError) -> None:
        if isinstance(error, HandshakeFailed):
            self._anew |= error.final
            self._bar(str(error))
        elif self.stationed is None:
            self._failed(RefusedError.misunderstood(self._plan.up, str(error)))

    def _bar(self, why: str) -> None:
        """The edge cannot take its place for a reason that people can mend."""
        if why != self._barred:
            self._barred = why
            self._plan.told(f"{why}; this edge goes on trying")


def _expiry(stationed: edge.Stationed) -> float:
    """The silence after which a coordinator is taken for gone, in seconds."""
    return stationed.heartbeat_seconds * stationed.patience
