"""What a Router says of peers that do not read what it sends them."""

from __future__ import annotations

import pytest

from fedemu.protocol.transport.full_queues import FullQueues


def test_a_peer_whose_queue_is_full_again_and_again_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    queues = FullQueues()
    for _ in range(999):
        queues.heard(b"\0\1")
    assert [record.message for record in caplog.records] == [
        f"the queue to peer 0001 is full; its messages are dropped (full queues so far: {times})"
        for times in (1, 10, 100)
    ]
