"""The coordinator's log."""

import errno
import logging
from pathlib import Path

import pytest

from fedemu.coordinator.observer import Absence
from fedemu.coordinator.record.row import Row
from fedemu.ops.watching.logs import LogFile, LogObserver


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
        observer.event("server_job_died", job="distil", round=3, cause="SIGKILL")
        observer.event("pictures_failed", task=1, detail="no space")
        observer.event("kept_outside", round=3, what="seen")
    assert [record.getMessage() for record in caplog.records] == [
        "server_job_died {'job': 'distil', 'round': 3, 'cause': 'SIGKILL'}",
        "pictures_failed {'task': 1, 'detail': 'no space'}",
        "kept_outside {'round': 3, 'what': 'seen'}",
    ]


def test_the_reason_of_failed_devices_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    observer = LogObserver()
    with caplog.at_level("WARNING"):
        for device in (3, 4):
            observer.event("failure", device=device, ask="1.0.0", reason="training", detail="ValueError: no, own.py:2")
    assert [record.getMessage() for record in caplog.records] == ["device 3 failed: ValueError: no, own.py:2"]


def test_what_a_device_says_of_its_failure_cannot_look_like_a_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = "no\n2026-01-01 00:00:00,000 1 INFO    fedemu.coordinator: the run is over"
    LogObserver().event("failure", device=3, ask="1.0.0", reason="training", detail=said)
    assert caplog.records[0].getMessage().splitlines() == [
        "device 3 failed: no",
        "    2026-01-01 00:00:00,000 1 INFO    fedemu.coordinator: the run is over",
    ]


def test_a_resumed_run_and_missing_devices_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    observer = LogObserver()
    with caplog.at_level(logging.INFO, "fedemu.coordinator"):
        observer.resumed([Row(round=1), Row(round=2)], 12.5)
        for absence in (Absence(30, 0, 60.0, "they count as failed"), Absence(30, 0, 59.0), None, None):
            observer.waiting(absence)
        observer.waiting(Absence(3, 27, machines=("attic", "cellar")))
    assert [record.getMessage() for record in caplog.records] == [
        "resumed at round 3, after 12.500 s of real time so far",
        "30 devices have no connection, 0 have one",
        "the missing devices are back, or are not waited for any more",
        "3 devices have no connection, 27 have one; away: attic, cellar",
    ]


def test_a_log_on_a_full_disk_is_told_once_and_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    handler = LogFile(tmp_path / "coordinator.log")
    monkeypatch.setattr(handler, "stream", Full())
    for _ in range(3):
        handler.emit(logging.makeLogRecord({"msg": "a line"}))
    path = tmp_path / "coordinator.log"
    assert capsys.readouterr().err == f"fedemu: the log {path} cannot be written: the disk is full; make room there\n"
