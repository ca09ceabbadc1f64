"""What a Router says of peers that do not read what it sends them."""

from __future__ import annotations

import logging

from fedemu.protocol.wording import is_milestone

logger = logging.getLogger(__name__)


class FullQueues:
    """Counts how often the queue to a peer of one Router was full, and logs the 1st, 10th, 100th... time.

    A peer that now and then reads a little would otherwise fill the log.
    """

    def __init__(self) -> None:
        self._times = 0

    def heard(self, peer: bytes) -> None:
        """The queue to this peer is full, and had room at the last message."""
        self._times += 1
        if is_milestone(self._times):
            logger.warning(
                "the queue to peer %s is full; its messages are dropped (full queues so far: %d)",
                peer.hex(),
                self._times,
            )
