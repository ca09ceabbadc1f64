"""Whole runs with real processes: the two-terminal form, and one digest for every layout of the fleet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from fedemu.coordinator.record.summary import Summary
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.invariants import outcomes_add_up
from fedemu.ops.stress.scenarios import SHORT
from fedemu.ops.stress.warm import WarmStart

FleetMaker = Callable[..., LiveFleet]
ONE = ("--trainers", "1")
UNREPORTED = ("runtime.transport=memory", "runtime.report=false")
"""The settings of a run in one process of which nobody reads a report."""


def test_neither_several_trainers_nor_packing_nor_one_process_for_everything_change_the_digest(
    new_fleet: FleetMaker, tmp_path: Path, warm: WarmStart
) -> None:
    """Libraries compute by other instructions what does not lie at a multiple of 64 bytes, or is left at the end.

    Here sizes are odd. ``test_replay_alone.py`` has several trainers and packs where sizes are even. In the one process
    of a command devices sleep until they are asked.
    """
    odd = (*SHORT.settings, "model.hidden=[13]", "local.batch_size=7")
    fleet = new_fleet(*odd)
    fleet.start_coordinator()
    fleet.start_devices(20, "--trainers", "2", "--per-process", "7")
    settings = [*odd, *UNREPORTED, "fleet.wake=on-demand"]
    words = ["run", "digits-small", *_overrides(settings), "--out", str(tmp_path / "run")]
    assert warm.start(words, tmp_path / "log", os.environ).wait(120) == 0, (tmp_path / "log").read_text()
    assert fleet.wait_for_end() == 0, fleet.tail()
    alone = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert fleet.summary()["model_digest"] == alone["model_digest"]


def test_two_machines_share_the_fleet_by_two_connections(new_fleet: FleetMaker, undisturbed: Summary) -> None:
    fleet = new_fleet(*SHORT.settings, "fleet.link=shared")
    fleet.start_coordinator()
    for machine, count in enumerate((7, 13)):
        fleet.start_devices(count, *ONE, state=str(machine))
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert fleet.summary()["model_digest"] == undisturbed.model_digest


def test_run_starts_both_sides_writes_a_report_and_prints_the_result_as_json_whatever_modules_lie_in_the_folder(
    tmp_path: Path, in_one_process: Callable[..., Summary]
) -> None:
    few = ("rounds=2", "fleet.devices=6", "fleet.per_round=3")
    for name in ("types.py", "torch.py", "fedemu/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise SystemExit('this module is not meant')")
    out = tmp_path / "run"
    words = ["run", "digits-small", *_overrides([*few, "runtime.trainers=1"]), "--out", str(out), "--format", "json"]
    command = [Path(sys.executable).with_name("fedemu"), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model_digest"] == in_one_process(tmp_path / "alone", *few).model_digest
    assert "report.html" in done.stderr
    assert "data:image/png;base64" in (out / "report.html").read_text()
    assert {path.name for path in (out / "plots").iterdir()} >= {"accuracy.png", "class_accuracy.png", "outcomes.png"}


def test_a_device_written_from_the_protocol_page_takes_part(new_fleet: FleetMaker) -> None:
    fleet = new_fleet(
        "rounds=3", "fleet.devices=4", "fleet.per_round=4", "availability={kind='always'}", "faults.crash_rate=0.0"
    )
    fleet.start_coordinator()
    fleet.start_devices(3, *ONE)
    fleet.wait_until(lambda: bool(fleet.processes("device")), "the first device process", 300)
    page = Path(__file__).parents[2] / "docs" / "minimal_device.py"
    with subprocess.Popen([sys.executable, str(page), fleet.address], stdout=subprocess.PIPE, text=True) as device:
        try:
            assert fleet.wait_for_end() == 0, fleet.tail()
            assert device.wait(300) == 0
        finally:
            device.kill()
    assert [row.accepted for row in fleet.rows()] == [4] * 3


def test_the_devices_may_come_first_and_an_interrupted_run_resumes_to_the_same_digest(
    new_fleet: FleetMaker, undisturbed: Summary
) -> None:
    fleet = new_fleet()
    supervisor = fleet.start_devices(20, *ONE)
    fleet.wait_until(lambda: "device" in fleet.tail(), "the supervisor's first line", 300)
    coordinator = fleet.start_coordinator()
    fleet.wait_for_round(3)
    coordinator.send_signal(signal.SIGINT)
    assert fleet.wait_for_end() == 4, fleet.tail()
    assert supervisor.wait(300) == 4, "the devices end with the outcome of the run"
    assert "--resume" in fleet.tail()
    fleet.start_coordinator()
    supervisor = fleet.start_devices(20, *ONE)
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert supervisor.wait(300) == 0
    assert outcomes_add_up(fleet.rows()) == []
    summary = fleet.summary()
    assert (summary["outcome"], summary["perturbed"]) == ("completed", False)
    assert not (fleet.run_directory / "report.html").exists(), "these fleets have runtime.report = false"
    assert summary["model_digest"] == undisturbed.model_digest


def _overrides(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_a_deadline_without_an_end_changes_nothing_where_all_reply_in_time(
    in_one_process: Callable[..., Summary], tmp_path: Path
) -> None:
    """Devices need not look as far ahead: here it would be more intervals than a device can announce."""
    churn = ("rounds=2", "fleet.devices=4", "fleet.per_round=2", "availability={kind='diurnal', spell=30.0}")
    runs = [in_one_process(tmp_path / seconds, *churn, f"fleet.deadline={seconds}") for seconds in ("1e5", "1e9")]
    assert runs[0].model_digest == runs[1].model_digest
    assert [run.perturbed for run in runs] == [False, False]
