"""What all transports share."""

from __future__ import annotations

import logging

import pytest

from fedemu.protocol.transport.interface import FULL_QUEUE, Repeated


def test_a_peer_whose_queue_is_full_again_and_again_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    queues = Repeated(logging.getLogger("queues"), FULL_QUEUE)
    for _ in range(999):
        queues.count("0001")
    assert [record.message for record in caplog.records] == [
        f"the queue to peer 0001 is full; its messages are dropped (full queues so far: {times})"
        for times in (1, 10, 100)
    ]
