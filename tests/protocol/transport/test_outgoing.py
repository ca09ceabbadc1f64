"""What is begun on a connection. The messages that wait are not lost with it."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from fedemu.protocol.codec import Buffer
from fedemu.protocol.transport.outgoing import FullQueues, Outgoing


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


def test_a_peer_whose_queue_is_full_again_and_again_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    queues = FullQueues()
    for _ in range(999):
        queues.heard(b"\0\1")
    assert [record.message for record in caplog.records] == [
        f"the queue to peer 0001 is full; its messages are dropped (full queues so far: {times})"
        for times in (1, 10, 100)
    ]
