"""Lines of wrong types do not end the page: they are left out, the page says so, and goes on with the next ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fedemu.ops.live.forms import is_event
from fedemu.ops.live.run import LiveRun
from fedemu.ops.live.story import Stories
from fedemu.ops.live.stream import Stream

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
