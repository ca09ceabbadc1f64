"""Lines of wrong types do not end the page: they are left out, the page says so, and goes on with the next ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedemu.coordinator.record.holder import UNNAMED
from fedemu.ops.live import machine
from fedemu.ops.live.devices import Devices
from fedemu.ops.live.forms import is_event
from fedemu.ops.live.found import Supervisor
from fedemu.ops.live.run import LiveRun
from fedemu.ops.live.story import Stories
from fedemu.ops.live.stream import Stream
from fedemu.ops.watching.feed import FLEET, LIVE, States

WRONG: dict[str, list[Any]] = {
    "metrics": [
        {"round": "one"},
        {"round": 1, "accuracy": [0.5]},
        {"round": 1, "class_accuracy": {"cat": 1.0}},
        {"round": 1, "class_accuracy": [0.5, "half"]},
        {"round": 10**400},
        {"round": 1, "round_seconds": float("inf")},
        {"round": 1, "device_metrics": [0.5]},
        {"round": 1, "remarks": "many"},
    ],
    "events": [
        {"event": 3},
        {"device": 3},
        {"event": "join", "device": "three"},
        {"event": "join", "device": -1},
        {"event": "join", "device": 3, "virtual_time": "soon"},
        {"event": "dropout", "device": 3, "back": {}},
        {"event": "checkpoint", "round": float("nan")},
        {"event": "checkpoint", "deep": [{"far": float("inf")}]},
    ],
    "asks": [
        {"ask": "1.0.0", "devices": 3, "outcomes": "a"},
        {"ask": "1.0.0", "devices": ["three"], "outcomes": "a"},
        {"ask": "1.0.0", "devices": [3], "outcomes": 7},
        {"ask": "1.0.0", "devices": [2, 3], "outcomes": "a"},
        {"ask": "1.0.0", "devices": [3], "outcomes": "a", "times": 7},
        {"ask": "1.0.0", "devices": [3], "outcomes": "a", "times": ["late"]},
        {"ask": 1, "devices": [3], "outcomes": "a"},
        {"ask": "1.0.0", "devices": [3], "outcomes": "a", "end": "never"},
    ],
}


ACCOUNT: dict[str, Any] = {
    "virtual_time": 3.5,
    "wall_time": 2.0,
    "counts": {"online": 3},
    "ask": {"ask": "1.0.0", "program": "sgd", "start": 1.0, "asked": 3, "wanted": 2, "counts": {"accepted": 1}},
    "absence": {"devices": 2, "connected": 10, "seconds": None, "then": "they count as failed", "away": ""},
    "job": {"name": "distil", "round": 1, "step": 2, "steps": 3},
    "later": {"any": ["thing"]},
}
WRONG_ACCOUNTS: list[dict[str, Any]] = [
    {"virtual_time": "x"},
    {"wall_time": [1.0]},
    {"wall_time": 10**400},
    {"counts": [3]},
    {"counts": {"online": "three"}},
    {"ask": "1.0.0"},
    {"ask": {"ask": 1}},
    {"ask": {"ask": "1.0.0", "asked": "three"}},
    {"ask": {"ask": "1.0.0", "counts": ["accepted"]}},
    {"absence": True},
    {"absence": {"devices": "two"}},
    {"job": {"name": ["distil"]}},
    {"later": float("nan")},
]
CREW: dict[str, Any] = {"zygote": 40, "trainers": {"0": 31}, "devices": [[41, [0, 1]]], "waiting": 3, "busy": [0]}
WRONG_CREWS: list[dict[str, Any]] = [
    {"trainers": [31]},
    {"trainers": {"first": 31}},
    {"trainers": {"9" * 5000: 31}},
    {"trainers": {"0": "31"}},
    {"trainers": {"0": -1}},
    {"devices": 3},
    {"devices": [41]},
    {"devices": [[41, [0], 2]]},
    {"devices": [[41, 0]]},
    {"devices": [[41, [[0]]]]},
    {"devices": [[2**40, [0]]]},
    {"waiting": "three"},
    {"waiting": None},
    {"busy": 1},
]


@pytest.mark.parametrize("wrong", WRONG_ACCOUNTS, ids=lambda part: str(part)[:60])
def test_an_account_of_wrong_types_is_ignored_and_the_page_goes_on(
    wrong: dict[str, Any], made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: UNNAMED)
    run = LiveRun(0, made.directory, Stream())
    path = made.directory / LIVE / FLEET
    path.parent.mkdir()
    told = []
    for account in (ACCOUNT | wrong, ACCOUNT):
        path.write_bytes(json.dumps({"pid": 7, **account}).encode() + b"\n" + bytes([States.TRAINING] * 12))
        run.look()
        told.append((run.snapshot()["status"]["virtual_time"], set(run.devices.states)))
    assert told == [(None, {States.ABSENT}), (3.5, {States.TRAINING})]


@pytest.mark.parametrize("wrong", WRONG_CREWS, ids=lambda part: str(part)[:60])
def test_a_supervisor_that_tells_wrong_types_shows_no_processes_and_the_page_goes_on(
    wrong: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = psutil.Process()
    monkeypatch.setattr(machine, "supervisors_of", lambda coordinator, directory: [Supervisor(own, directory)])
    looks = machine.Machine(tmp_path)
    counts = []
    for crew in (CREW | wrong, CREW):
        (tmp_path / f"machine-{own.pid}").write_text(json.dumps({"pid": own.pid, **crew}) + "\n")
        looks.look(own.pid)
        counts.append((looks.counts()["trainer"], looks.counts()["device"], looks.process_of(1)))
    assert counts == [(0, 0, None), (1, 1, 41)]


def test_a_frozen_device_that_the_experiment_does_not_have_is_left_out() -> None:
    devices = Devices(2, virtual=True)
    devices.frozen = {1, 7}
    assert list(devices.shown()) == [States.ABSENT, States.FROZEN]


@pytest.mark.parametrize(
    ("log", "line"), [(log, line) for log, lines in WRONG.items() for line in lines], ids=lambda part: str(part)[:60]
)
async def test_a_line_of_wrong_types_is_left_out_and_the_page_goes_on(
    log: str, line: dict[str, Any], made: Any
) -> None:
    run = LiveRun(0, made.directory, Stream())
    with (made.directory / f"{log}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    run.look()
    made.row(1)
    made.append("events", {"event": "join", "device": 3, "virtual_time": 0.0, "later": {"any": ["thing"]}})
    made.ask(1, [3], "a")
    run.look()
    shown = run.snapshot()
    assert [len(shown[part]) for part in ("rows", "events", "asks")] == [1, 1, 1]
    assert shown["status"]["unread"] == f"1 line of {log}.jsonl left out, not of the form of this version"
    story = await Stories().of(run, 3)
    assert [len(story[part]) for part in ("visits", "events")] == [1, 1]


def test_an_event_of_thousands_of_lists_within_each_other_is_left_out() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    assert is_event({"event": "checkpoint", "deep": []})
    assert not is_event({"event": "checkpoint", "deep": deep})


def test_lines_of_several_logs_are_counted_together(made: Any) -> None:
    run = LiveRun(0, made.directory, Stream())
    for log in ("asks", "metrics"):
        (made.directory / f"{log}.jsonl").write_text("no json\n")
    run.look()
    told = run.snapshot()["status"]["unread"]
    assert told == "2 lines of metrics.jsonl and asks.jsonl left out, not of the form of this version"
