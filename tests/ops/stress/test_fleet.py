"""A fleet under observation, as far as it can be looked at without processes."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedemu.ops.cli import commands
from fedemu.ops.stress.fleet import FleetTimeout, LiveFleet, finished_rounds

STARTS = """
import pathlib, sys
from fedemu.ops.stress.fleet import LiveFleet

fleet = LiveFleet(pathlib.Path(sys.argv[1]), address=sys.argv[2])
device = fleet.start_devices(1)
fleet.wait_until(lambda: "process" in fleet.log_of(device).read_text(), "the beginning of its command", 60.0)
print(device.pid, flush=True)
input()
"""
"""A program that starts a fleet, tells the process id of its machine, and is killed."""


def test_only_rounds_whose_row_is_written_to_its_end_are_over(tmp_path: Path) -> None:
    assert finished_rounds(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2}\n{"rou')
    assert finished_rounds(tmp_path) == 2


def test_rows_events_and_settings_are_those_of_the_run_directory(tmp_path: Path) -> None:
    fleet = LiveFleet(tmp_path, address="tcp://127.0.0.1:1")
    assert (fleet.rounds(), fleet.rows(), fleet.events()) == (0, (), [])
    fleet.run_directory.mkdir()
    (fleet.run_directory / "metrics.jsonl").write_text('{"round": 1, "accepted": 3}\n')
    (fleet.run_directory / "events.jsonl").write_text('{"event": "join"}\n{"ev')
    (fleet.run_directory / "config.toml").write_text("[fleet]\nper_round = 5\n")
    assert [row.accepted for row in fleet.rows()] == [3]
    assert fleet.events() == [{"event": "join"}]
    assert fleet.setting("fleet", "per_round") == 5


def test_an_event_that_did_not_happen_in_time_is_named_with_the_end_of_the_output(tmp_path: Path) -> None:
    fleet = LiveFleet(tmp_path, address="tcp://127.0.0.1:1")
    (fleet.logs / "01-coordinator.log").write_text("first\nlast words\n")
    with pytest.raises(
        FleetTimeout, match=r"round 3 did not happen within 0 s\n--- 01-coordinator.log\nfirst\nlast words"
    ):
        fleet.wait_for_round(3, seconds=0.0)


def test_a_process_that_ends_by_itself_while_the_fleet_is_ended_is_no_error(tmp_path: Path) -> None:
    class Ending(psutil.Process):  # type: ignore[misc]
        """It still runs when it is asked, and has ended when the signal comes."""

        def is_running(self) -> bool:
            process.kill()
            process.wait()
            return True

    fleet = LiveFleet(tmp_path, address="tcp://127.0.0.1:1")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        fleet.coordinator = Ending(process.pid)
        fleet.close(seconds=1.0)
    assert process.returncode == -signal.SIGKILL


def test_a_process_that_has_outlived_its_parent_belongs_to_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(words: Sequence[str], log: Path, environment: Mapping[str, str]) -> psutil.Popen:
        """A machine whose child has started another process and ended."""
        return psutil.Popen(["sh", "-c", "(sleep 60 &); read nothing"], stdin=subprocess.PIPE, start_new_session=True)

    monkeypatch.setattr("fedemu.ops.stress.fleet.LEFT_SECONDS", 0.0)
    fleet = LiveFleet(tmp_path, address="tcp://127.0.0.1:1", start=start)
    machine = fleet.start_devices(1)

    def left() -> list[psutil.Process]:
        return [process for process in fleet.all_processes() if process.name() == "sleep"]

    fleet.wait_until(lambda: len(left()) == 1 and not machine.children(), "the end of the child", 20.0)
    (process,) = left()
    assert {each.pid for each in fleet.all_processes()} == {machine.pid, process.pid}
    fleet.close()
    assert fleet.leftovers() == [f"still running after the end: {process.pid} sleep"]
    process.kill()
    fleet.wait_until(lambda: fleet.leftovers() == [], "the end of all", 20.0)


def test_a_fleet_ends_with_the_process_that_has_started_it_even_if_that_is_killed(
    tmp_path: Path, socket_folder: Path
) -> None:
    words = [sys.executable, "-c", STARTS, str(tmp_path), f"ipc://{socket_folder}/nobody"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starting:
        assert starting.stdout is not None
        machine = psutil.Process(int(starting.stdout.readline()))
        starting.kill()
        try:
            gone, _ = psutil.wait_procs([machine], timeout=20)
            assert gone
        finally:
            if machine.is_running():
                machine.kill()


def test_a_fleet_that_does_not_come_on_is_told_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def waits(*_: Any) -> None:
        raise FleetTimeout("round 6 did not happen within 600 s")

    monkeypatch.setattr("fedemu.ops.stress.strangers.telling.play_strangers", waits)
    with pytest.raises(SystemExit) as ended:
        commands.command(["stress", "strangers"], prog_name="fedemu")
    assert (ended.value.code, capsys.readouterr().err) == (5, "fedemu: round 6 did not happen within 600 s\n")
