"""The memory for answers: the outcomes of recent asks, and how often each peer was refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Duplicate, Late, Verdict

RECENT_ASKS = 64
"""The number of asks whose outcomes are remembered, at most."""
RECENT_OUTCOMES = 1_000_000
"""Earlier asks are forgotten if the asks that are remembered have more outcomes than this together."""
BURST = 8
"""The number of refusals of one peer that are answered at once. Each further second allows one more."""
REFUSED_PEERS = 4096
"""The number of refused peers that are remembered."""


class Verdicts:
    """The outcomes of recent asks. They are the answers to results that come too late, or come again."""

    def __init__(self) -> None:
        self._asks: OrderedDict[str, Mapping[DeviceId, Verdict]] = OrderedDict()

    def remember(self, ask: AskId, verdicts: Mapping[DeviceId, Verdict]) -> None:
        """Keep the outcomes of a closed ask, and forget the oldest asks if there are too many, or too many outcomes."""
        self._asks[str(ask)] = verdicts
        outcomes = sum(map(len, self._asks.values()))
        while len(self._asks) > RECENT_ASKS or (outcomes > RECENT_OUTCOMES and len(self._asks) > 1):
            outcomes -= len(self._asks.popitem(last=False)[1])

    def answer(self, ask: str, device: DeviceId) -> Duplicate | Late:
        """The answer to a result of this device for an ask that is not open."""
        verdict = self._asks.get(ask, {}).get(device)
        return Late(ask=ask) if verdict is None else Duplicate(ask=ask, verdict=verdict)


class Refusals:
    """The number of refusals by peer: a peer is answered often enough to learn of it, and too seldom to be kept busy.

    ``idle`` are the peers that wanted to enrol when the fleet was full.
    """

    def __init__(self) -> None:
        self.idle: OrderedDict[bytes, None] = OrderedDict()
        self._spent: OrderedDict[bytes, tuple[float, float]] = OrderedDict()

    def allow(self, peer: bytes, reason: str, now: float) -> bool:
        """Count a refusal at ``now`` (seconds, monotonic). The result says whether the peer is to be told.

        Forgets the peers that were refused longest ago if there are too many.
        """
        if reason == "fleet_full":
            self.idle[peer] = None
        spent, since = self._spent.pop(peer, (0.0, now))
        spent = max(0.0, spent - (now - since))
        allowed = spent <= BURST - 1
        self._spent[peer] = (spent + 1 if allowed else spent, now)
        for known in (self._spent, self.idle):
            while len(known) > REFUSED_PEERS:
                known.popitem(last=False)
        return allowed

    def forget(self, peer: bytes) -> None:
        """Forget a peer that has gone."""
        self._spent.pop(peer, None)
        self.idle.pop(peer, None)
