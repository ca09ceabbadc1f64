"""The coordinator's log."""

import logging

import pytest

from fedemu.ops.logs import LogObserver


def test_a_flood_of_rejected_messages_is_logged_by_powers_of_ten(caplog: pytest.LogCaptureFixture) -> None:
    observer = LogObserver()
    with caplog.at_level(logging.WARNING, "fedemu.coordinator"):
        for _ in range(250):
            observer.rejected("encoding")
        observer.rejected("depth")
    assert [record.getMessage() for record in caplog.records] == [
        "a message was rejected: encoding (1 so far)",
        "a message was rejected: encoding (10 so far)",
        "a message was rejected: encoding (100 so far)",
        "a message was rejected: depth (1 so far)",
    ]
