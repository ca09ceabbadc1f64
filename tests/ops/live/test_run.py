"""What the page shows of a run follows from the files of its directory."""

import base64
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fedemu.coordinator.record.holder import UNNAMED, holder_of
from fedemu.ops.experiment.sources import write_frozen
from fedemu.ops.live.devices import NO_OUTCOME
from fedemu.ops.live.run import LiveRun
from fedemu.ops.live.stream import Stream
from fedemu.ops.watching.feed import FLEET, LIVE, States, is_watched
from fedemu.protocol.errors import ConfigurationError

HOLDS_A_LOCK = """
import fcntl, sys
lock = open(sys.argv[1], "ab")
fcntl.lockf(lock, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


class Told(Stream):
    """Keeps what the viewers are told last: the kind of the message, and the message."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.message = "", dict[str, Any]()

    def add(self, event: str, message: dict[str, Any]) -> None:
        super().add(event, message)
        self.kind, self.message = event, message


def news(run: LiveRun) -> dict[str, Any]:
    """What the viewers are told by the next look."""
    stream = run.stream
    assert isinstance(stream, Told)
    stream.message = {}
    run.look()
    return stream.message


def states(text: str) -> list[int]:
    return list(base64.b64decode(text))


def write_account(made: Any, head: dict[str, Any], state: States = States.ONLINE) -> None:
    """Write a fresh account of a coordinator in whose eyes every device does the same."""
    path = made.directory / LIVE / FLEET
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(json.dumps({"pid": 7, **head}).encode() + b"\n" + bytes([state] * 12))


def told_times(run: LiveRun) -> tuple[Any, Any]:
    """The experiment's time and the real time that the next look tells."""
    status = news(run)["status"]
    return status["virtual_time"], status["wall_time"]


def test_rows_events_and_asks_come_as_they_are_written(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.row(1, class_accuracy=[1.0, 0.5], period_accuracy=[0.25])
    made.append("events", {"event": "join", "device": 3, "virtual_time": 0.0})
    made.ask(1, [3, 5], "ad")
    first = news(run)
    assert [(row["round"], row["period_accuracy"]) for row in first["rows"]] == [(1, [0.25])]
    assert first["events"][0]["device"] == 3
    assert first["asks"][0]["counts"] == {"a": 1, "d": 1}
    assert (run.devices.visits[3], run.devices.outcomes[5], first["visited"]) == (1, 3, [3, 5])
    assert (first["status"]["state"], first["status"]["best"]) == ("stopped", 0.5)
    made.row(2, class_accuracy=[0.5, 0.7])
    second = news(run)
    assert set(second) == {"number", "message", "rows", "status"}
    assert second["rows"][0]["forgetting"] == pytest.approx(0.15)  # class 0 lost 0.5, class 1 gained 0.2
    assert news(run) == {}
    whole = run.snapshot()
    assert [row["round"] for row in whole["rows"]] == [1, 2]
    assert (first["message"], second["message"], whole["message"]) == (1, 2, 2)
    assert states(whole["fleet"]["states"])[3] == States.ONLINE


def test_events_are_counted_in_the_whole_run_though_only_the_last_are_kept(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.ops.live.run.KEPT_EVENTS", 2)
    run = LiveRun(0, made.directory, Told())
    made.append("events", *({"event": "join", "device": device, "virtual_time": 0.0} for device in range(3)))
    assert news(run)["kinds"] == {"join": 3}
    made.append("events", {"event": "death", "device": 1, "virtual_time": 1.0})
    assert news(run)["kinds"] == {"join": 3, "death": 1}
    whole = run.snapshot()
    assert whole["kinds"] == {"join": 3, "death": 1}
    assert [event["event"] for event in whole["events"]] == ["join", "death"]


def test_names_of_classes_come_once_the_run_tells_them(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.row(1)
    assert "run" not in news(run)
    assert run.about()["classes"] == ()
    (made.directory / "data.json").write_text('{"class_names": ["rose", "tulip"]}')
    assert news(run)["run"]["classes"] == ("rose", "tulip")
    assert news(run) == {}


def test_what_was_read_by_a_look_that_the_system_refuses_is_told_by_the_next_one(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if other connections to the page took all files that it may open while it looks for supervisors."""
    run = LiveRun(0, made.directory, Told())
    made.row(1)
    news(run)
    made.row(2)
    made.append("events", {"event": "join", "device": 3, "virtual_time": 0.0})
    made.ask(2, [3, 5], "ad")
    with monkeypatch.context() as shortage:
        shortage.setattr(run.machine, "look", MagicMock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(OSError, match="Too many open files"):
            news(run)
    made.row(3)
    whole = news(run)
    assert run.stream.kind == "snapshot"  # type: ignore[attr-defined]
    assert [row["round"] for row in whole["rows"]] == [1, 2, 3]
    assert ([event["device"] for event in whole["events"]], whole["asks"][0]["counts"]) == ([3], {"a": 1, "d": 1})
    made.row(4)
    news(run)
    assert run.stream.kind == "tick"  # type: ignore[attr-defined]


def test_many_rows_that_come_at_once_as_in_a_folder_that_is_copied_are_all_told(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.append("metrics", *({"round": round} for round in range(1, 1501)))
    assert [row["round"] for row in news(run)["rows"]] == [*range(1, 1501)]
    made.append("metrics", *({"round": round} for round in range(1501, 4001)))
    rounds = [row["round"] for row in news(run)["rows"]]
    assert run.stream.kind == "snapshot"  # type: ignore[attr-defined]
    assert rounds == [*range(2, 4001, 2)]


def test_viewers_are_told_of_a_long_log_when_all_of_it_is_read(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedemu.ops.live.tail.MOST_BYTES", 1000)
    run = LiveRun(0, made.directory, Told())
    made.append("metrics", *({"round": round} for round in range(1, 101)))
    told = [news(run)]
    while run.is_behind:
        told.append(news(run))
    assert told[:-1] == [{}]
    assert [row["round"] for row in told[-1]["rows"]] == [*range(1, 101)]
    assert (told[-1]["status"]["round"], run.stream.kind) == (100, "snapshot")  # type: ignore[attr-defined]
    made.row(101)
    assert [row["round"] for row in news(run)["rows"]] == [101]
    assert run.stream.kind == "tick"  # type: ignore[attr-defined]


def test_a_device_that_dropped_out_is_away_until_it_is_back(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.append(
        "events",
        {"event": "join", "device": 1, "virtual_time": 0.0},
        {"event": "dropout", "device": 1, "cause": "crash", "back": 9.0, "virtual_time": 2.0},
        {"event": "death", "device": 1, "virtual_time": 2.0},
        {"event": "join", "device": 1, "virtual_time": 2.0},
        {"event": "dropout", "device": 2, "cause": "offline", "back": 20.0, "virtual_time": 2.0},
    )
    run.look()
    assert list(run.devices.states[1:3]) == [States.CRASHED, States.AWAY]
    made.row(1, virtual_time=10.0)
    run.look()
    assert list(run.devices.states[1:3]) == [States.ONLINE, States.AWAY]


def test_a_device_that_dropped_out_and_never_comes_back_stays_away(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.append(
        "events",
        {"event": "leave", "device": 1, "reason": "offline", "virtual_time": 1.0},
        {"event": "join", "device": 1, "virtual_time": 1.0},
        {"event": "dropout", "device": 1, "cause": "offline", "back": None, "virtual_time": 2.0},
    )
    made.row(1, virtual_time=1e9)
    run.look()
    assert run.devices.states[1] == States.AWAY
    made.append("events", {"event": "join", "device": 1, "virtual_time": 2e9})
    run.look()
    assert run.devices.states[1] == States.AWAY, "it has a connection, and is not on-line"


def test_a_device_that_dropped_out_under_the_wall_clock_is_away_until_it_joins(make: Any) -> None:
    made = make("run", "clock.kind=wall")
    run = LiveRun(0, made.directory, Told())
    made.append(
        "events",
        {"event": "death", "device": 1, "virtual_time": 2.0},
        {"event": "leave", "device": 2, "reason": "offline", "virtual_time": 2.0},
        {"event": "silence", "device": 3, "virtual_time": 2.0},
        {"event": "join", "device": 3, "virtual_time": 3.0},
        {"event": "dropout", "device": 1, "cause": "crash", "back": None, "virtual_time": 4.0},
        {"event": "dropout", "device": 2, "cause": "offline", "back": None, "virtual_time": 4.0},
        {"event": "dropout", "device": 3, "cause": "silence", "back": None, "virtual_time": 4.0},
    )
    made.row(1, virtual_time=10.0)
    run.look()
    assert list(run.devices.states[1:4]) == [States.CRASHED, States.AWAY, States.ONLINE]
    made.append("events", {"event": "join", "device": 1, "virtual_time": 11.0})
    run.look()
    assert list(run.devices.states[1:4]) == [States.ONLINE, States.AWAY, States.ONLINE]


def test_a_device_whose_channel_in_a_shared_connection_was_closed_has_lost_it_until_it_joins(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.append(
        "events",
        *({"event": "join", "device": device, "virtual_time": 0.0} for device in (1, 2)),
        {"event": "dropout", "device": 2, "cause": "leave", "back": 9.0, "virtual_time": 1.0},
        *({"event": "closed", "device": device, "virtual_time": 2.0} for device in (1, 2, None)),
    )
    run.look()
    assert list(run.devices.states[1:3]) == [States.CRASHED, States.AWAY]
    made.append("events", {"event": "join", "device": 1, "virtual_time": 3.0})
    run.look()
    assert list(run.devices.states[1:3]) == [States.ONLINE, States.AWAY]


def test_a_device_that_was_asked_has_been_here_also_if_it_sleeps_until_then_and_no_event_tells_of_it(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.append("events", {"event": "leave", "device": 3, "reason": "leave", "untold": 1, "virtual_time": 1.0})
    made.append("asks", {"ask": "1.0.0", "devices": [1, 3], "outcomes": "ad"})
    run.look()
    assert list(run.devices.states[1:4]) == [States.ONLINE, States.ABSENT, States.AWAY]


def test_a_device_that_was_back_before_it_left_at_the_end_has_left(made: Any) -> None:
    made.append(
        "events",
        {"event": "dropout", "device": 1, "cause": "crash", "back": 5.0, "virtual_time": 2.0},
        {"event": "leave", "device": 1, "reason": "completed", "virtual_time": 10.0},
        {"event": "dropout", "device": 2, "cause": "crash", "back": 5.0, "virtual_time": 2.0},
        {"event": "join", "device": 2, "virtual_time": 6.0},
    )
    made.row(1, virtual_time=10.0)
    run = LiveRun(0, made.directory, Told())
    run.look()
    assert list(run.devices.states[1:3]) == [States.AWAY, States.ONLINE]


def test_a_resumed_run_is_told_from_its_beginning(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.row(1)
    made.row(2, accuracy=0.6)
    run.look()
    lines = (made.directory / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (made.directory / "metrics.jsonl").write_bytes(lines[0])
    made.row(2, accuracy=0.7)
    made.row(3)
    assert [row["accuracy"] for row in news(run)["rows"]] == [0.5, 0.7, 0.5]
    assert run.stream.kind == "snapshot"


def test_a_run_that_got_more_rounds_says_so(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.row(1)
    assert set(news(run)) == {"number", "message", "rows", "status"}
    rounds = run.experiment.rounds + 7
    write_frozen(run.experiment.model_copy(update={"rounds": rounds}), made.directory)
    told = news(run)
    assert (told["run"]["rounds"], [row["round"] for row in told["rows"]]) == (rounds, [1])
    assert dict(told["settings"])["rounds"] == str(rounds)
    assert news(run) == {}


def test_the_account_of_the_process_that_holds_the_lock_is_believed(made: Any) -> None:
    """Nobody else's: neither one without a lock nor one that has ended."""
    lock = made.directory / ".lock"
    lock.touch()
    assert holder_of(lock) is None
    assert holder_of(made.directory / "none") is None
    run = LiveRun(0, made.directory, Told())
    run.look()
    assert not (made.directory / LIVE).exists(), "a run that is over is not touched"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_LOCK, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        assert holder_of(lock) == holder.pid
        assert news(run)["status"]["state"] == "waiting"
        assert is_watched(made.directory / LIVE)
        told = bytes([States.TRAINING] * 12)
        account = made.directory / LIVE / FLEET
        account.write_bytes(json.dumps({"pid": os.getpid()}).encode() + b"\n" + told)
        run.look()
        assert set(run.devices.states) == {States.ABSENT}, "another process has written it"
        account.write_bytes(b"{")
        run.look()
        account.write_bytes(json.dumps({"pid": holder.pid, "ask": {"ask": "1.0.0"}}).encode() + b"\n" + told)
        status = news(run)["status"]
        assert (status["state"], status["ask"], set(run.devices.states)) == (
            "running",
            {"ask": "1.0.0"},
            {States.TRAINING},
        )
        holder.kill()
    assert news(run)["status"]["state"] == "stopped"
    assert set(run.devices.states) == {States.ABSENT}, "its account is not believed any more"


def test_a_coordinator_without_a_number_here_is_at_work(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is in another container. Its account is believed while it is fresh, and no process is looked for."""
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: UNNAMED)
    run = LiveRun(0, made.directory, Told())
    assert news(run)["status"]["state"] == "waiting"
    write_account(made, {"ask": {"ask": "1.0.0"}}, States.TRAINING)
    status = news(run)["status"]
    assert (status["state"], status["ask"], status["coordinator"]) == ("running", {"ask": "1.0.0"}, UNNAMED)
    assert run.machine.counts()["coordinator"] == 0
    made.ask(1, [3], "a")
    assert news(run)["status"]["ask"] is None, "the log is newer than the account"


def test_the_time_that_is_left_follows_from_the_last_rounds_however_many_rows_are_shown(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: UNNAMED)
    monkeypatch.setattr("fedemu.ops.live.rows.MOST_POINTS", 2)
    run = LiveRun(0, made.directory, Told())
    for round in (1, 2, 3, 4):
        slow = round % 2 == 0
        made.row(round, accuracy=0.5 if slow else None, round_seconds=9.0 if slow else 1.0)
    status = news(run)["status"]
    assert (status["state"], status["seconds_left"]) == ("running", 5.0)


def test_a_resumed_run_waits_until_its_devices_are_there_and_no_time_is_told_as_long_as_some_are_absent(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: UNNAMED)
    run = LiveRun(0, made.directory, Told())

    def told(ask: str = "", absent: int = 0, job: str = "") -> tuple[Any, Any]:
        account = {
            "ask": {"ask": ask} if ask else None,
            "absence": {"devices": absent} if absent else None,
            "job": {"name": job} if job else None,
        }
        write_account(made, account)
        run.look()
        status = run.snapshot()["status"]
        return status["state"], status["seconds_left"]

    made.row(1)
    made.row(2)
    assert told() == ("running", 1.5)
    made.append("events", {"event": "resume", "round": 3})
    assert told() == ("waiting", None)
    assert told(absent=12) == ("waiting", None)
    made.append("events", {"event": "fleet_complete", "devices": 12})
    assert told() == ("running", 1.5)
    assert told(ask="3.0.0") == ("running", 1.5)
    assert told(ask="3.0.0", absent=2) == ("running", None)
    assert told(job="distil", absent=12) == ("running", None)
    assert told(absent=2) == ("waiting", None)
    made.append("events", {"event": "resume", "round": 3}, {"event": "fleet_incomplete", "missing": 2})
    assert told() == ("running", 1.5)


def test_an_outcome_of_a_later_version_counts_as_none(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    made.ask(1, [3, 5], "az")
    run.look()
    assert (run.devices.outcomes[3], run.devices.outcomes[5], run.devices.visits[5]) == (0, NO_OUTCOME, 1)


def test_few_changes_are_sent_one_by_one_and_many_all_at_once(made: Any) -> None:
    run = LiveRun(0, made.directory, Told())
    devices = run.devices
    assert devices.changes() == {}
    devices.happened({"event": "join", "device": 7})
    assert devices.changes() | {"outcomes": ""} == {
        "at": [7],
        "states": base64.b64encode(bytes([States.ONLINE])).decode(),
        "outcomes": "",
    }
    devices.told(bytes([States.ONLINE] * 12))
    assert "at" not in devices.changes()


def test_what_devices_do_follows_from_the_events_again_as_soon_as_the_coordinator_tells_it_no_more(made: Any) -> None:
    devices = LiveRun(0, made.directory, Told()).devices
    devices.happened({"event": "join", "device": 7})
    followed = list(devices.states)
    assert followed == [States.ONLINE if device == 7 else States.ABSENT for device in range(12)]
    devices.told(bytes([States.TRAINING] * 12))
    devices.happened({"event": "leave", "device": 8})
    assert set(devices.states) == {States.TRAINING}
    devices.told(b"of another length")
    assert list(devices.states) == [*followed[:8], States.AWAY, *followed[9:]]


def test_a_device_that_crashed_is_told_from_others_that_are_away_also_after_the_coordinator_was_started_again(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: UNNAMED)
    run = LiveRun(0, made.directory, Told())
    made.append(
        "events",
        {"event": "dropout", "device": 1, "cause": "crash", "back": None, "virtual_time": 2.0},
        {"event": "dropout", "device": 2, "cause": "crash", "back": 9.0, "virtual_time": 2.0},
        {"event": "dropout", "device": 3, "cause": "offline", "back": 20.0, "virtual_time": 2.0},
        {"event": "resume", "round": 1, "virtual_time": 4.0},
        {"event": "join", "device": 1, "virtual_time": 4.0},
    )
    write_account(made, {"virtual_time": 5.0}, States.AWAY)
    run.look()
    assert list(run.devices.states[1:4]) == [States.CRASHED, States.CRASHED, States.AWAY]
    write_account(made, {"virtual_time": 9.0}, States.AWAY)
    run.look()
    assert list(run.devices.states[1:4]) == [States.CRASHED, States.AWAY, States.AWAY]
    write_account(made, {"virtual_time": 9.0}, States.ONLINE)
    run.look()
    assert set(run.devices.states) == {States.ONLINE}


def test_of_the_account_and_the_rows_the_one_counts_that_tells_a_later_time(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: UNNAMED)
    run = LiveRun(0, made.directory, Told())
    write_account(made, {"virtual_time": 0.0, "wall_time": 3.5})
    assert told_times(run) == (0.0, 3.5)
    made.row(1, virtual_time=8.0, wall_time=3.0)
    assert told_times(run) == (8.0, 3.5)
    write_account(made, {"virtual_time": 9.5, "wall_time": 4.0})
    assert told_times(run) == (9.5, 4.0)
    (made.directory / LIVE / FLEET).unlink()
    assert told_times(run) == (8.0, 3.0)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="is no run directory"):
        LiveRun(0, tmp_path, Told())


def test_a_run_whose_command_has_begun_is_starting_until_its_coordinator_comes_and_is_not_resumed_meanwhile(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinators: list[int | None] = [None]
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: coordinators[-1])
    run = LiveRun(0, made.directory, Told(), is_starting=True)
    (made.directory / "summary.json").write_text('{"outcome": "interrupted"}')

    assert news(run)["status"]["state"] == "starting"
    with pytest.raises(ConfigurationError, match=r"^the command that serves this page is starting the run$"):
        run.resume()
    assert not (made.directory / "logs").exists()
    coordinators.append(UNNAMED)
    assert news(run)["status"]["state"] == "waiting"
    coordinators.append(None)
    assert news(run)["status"]["state"] == "interrupted"


def test_a_run_is_starting_again_until_the_coordinator_of_the_command_has_come_though_that_writes_the_report_then(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinators: list[int | None] = [None]
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: coordinators[-1])
    start, started = subprocess.Popen, list[subprocess.Popen[bytes]]()
    monkeypatch.setattr(
        "fedemu.ops.live.resuming.subprocess.Popen",
        lambda words, **how: started.append(start(["sleep", "1000"], **how)) or started[-1],
    )
    run = LiveRun(0, made.directory, Told())
    made.row(1)
    assert news(run)["status"]["state"] == "stopped"
    try:
        run.resume()
        assert news(run)["status"]["state"] == "resuming"
        coordinators.append(UNNAMED)
        assert news(run)["status"]["state"] == "running"
        coordinators.append(None)
        (made.directory / "summary.json").write_text('{"outcome": "completed"}')
        assert news(run)["status"]["state"] == "completed"
        with pytest.raises(ConfigurationError, match="goes on already"):
            run.resume()
    finally:
        for process in started:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("uncollected")
def test_a_run_ended_as_its_newest_summary_says_and_lists_in_lists_without_end_are_none(made: Any) -> None:
    run, summary = LiveRun(0, made.directory, Told()), made.directory / "summary.json"
    contents = [
        '{"outcome": "quorum"}',
        '{"outcome": "completed", "model_digest": "37ea"}',
        f'{{"outcome": "completed", "rounds": {run.experiment.rounds - 1}}}',  # it has got one more since
        "[" * 100_000,
    ]
    ends = [("quorum", None), ("completed", "37ea"), ("interrupted", None), ("stopped", None)]
    for time, (content, end) in enumerate(zip(contents, ends, strict=True)):
        summary.write_text(content)
        os.utime(summary, (time, time))
        status = news(run)["status"]
        assert (status["state"], status["digest"]) == end
