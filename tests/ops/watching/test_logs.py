"""The coordinator's log."""

import logging

import pytest

from fedemu.ops.watching.logs import LogObserver


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


def test_a_server_job_is_logged_once_for_each_tenth_of_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    observer = LogObserver()
    with caplog.at_level(logging.INFO, "fedemu.coordinator"):
        for step in range(1, 31):
            observer.server_job("distil", 3, step, 200)
    assert [record.getMessage() for record in caplog.records] == [
        "round 3, server job distil: step 1 of at most 200",
        "round 3, server job distil: step 20 of at most 200",
    ]


def test_only_failures_that_a_run_survives_are_warnings(caplog: pytest.LogCaptureFixture) -> None:
    observer = LogObserver()
    with caplog.at_level(logging.WARNING, "fedemu.coordinator"):
        observer.event("checkpoint", round=3)
        observer.event("server_job_died", job="distil", round=3, cause="signal SIGKILL")
        observer.event("pictures_failed", task=1, detail="no space")
    assert [record.getMessage() for record in caplog.records] == [
        "server_job_died {'job': 'distil', 'round': 3, 'cause': 'signal SIGKILL'}",
        "pictures_failed {'task': 1, 'detail': 'no space'}",
    ]


def test_the_reason_of_failed_devices_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    observer = LogObserver()
    with caplog.at_level("WARNING"):
        for device in (3, 4):
            observer.event("failure", device=device, ask="1.0.0", reason="training", detail="ValueError: no, own.py:2")
    assert [record.getMessage() for record in caplog.records] == ["device 3 failed: ValueError: no, own.py:2"]
