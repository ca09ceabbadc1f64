"""What is begun on a connection. The messages that wait are not lost with it."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from fedemu.protocol.codec import Buffer
from fedemu.protocol.transport.outgoing import Outgoing


class Full:
    """A socket that takes nothing now."""

    def sendmsg(self, pieces: object) -> int:
        raise BlockingIOError


def test_no_more_messages_are_begun_than_go_to_the_kernel_at_once() -> None:
    waiting: deque[list[Buffer]] = deque([b"message"] for _ in range(2000))
    outgoing = Outgoing(waiting)
    full: Any = Full()
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            outgoing.send(full, ready=True, sealed=False)
    assert outgoing.begun
    assert len(waiting) > 1400
