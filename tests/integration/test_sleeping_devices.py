"""Devices that sleep until they are asked. Machines, coordinator and edges are killed, and the digest stays."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedemu.coordinator.record.records import read_record, record_name
from fedemu.coordinator.record.summary import Summary
from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.stress.fleet import LiveFleet, finished_rounds
from fedemu.ops.stress.invariants import outcomes_add_up
from fedemu.ops.stress.scenarios import SHORT
from fedemu.ops.stress.warm import WarmStart

FleetMaker = Callable[..., LiveFleet]
ASLEEP = "fleet.wake=on-demand"
TEN_A_ROUND = (
    "rounds=4",
    "fleet.per_round=10",
    "fleet.over_selection=1",
    "fleet.deadline=1e9",
    ASLEEP,
    "data.partition={kind='resampled',samples=4}",
    "availability={kind='always'}",
    "model.hidden=[4]",
)


@pytest.mark.parametrize("link", ["own", "shared"])
def test_with_keys_a_killed_pack_a_killed_machine_and_a_killed_coordinator_leave_the_digest(
    link: str, new_fleet: FleetMaker, undisturbed: Summary, tmp_path: Path
) -> None:
    here, there = KeyFolder(tmp_path / "here"), KeyFolder(tmp_path / "there")
    server = here.new()
    here.approve("there", there.new())
    fleet = new_fleet(*SHORT.settings, ASLEEP, f"fleet.link={link}")
    keys = ("--keys", str(there.path), "--server-key", server, "--trainers", "1", "--per-process", "5")
    coordinator = fleet.start_coordinator("--keys", str(here.path))
    machine = fleet.start_devices(20, *keys)
    fleet.wait_for_round(2)
    packs = fleet.processes("device")
    assert 1 <= len(packs) <= 3, "a cohort fits into two packs of five, and a third while some leave"
    packs[0].kill()
    fleet.wait_for_round(fleet.rounds() + 2)
    fleet.signal(machine, signal.SIGKILL)
    machine.wait(60)
    fleet.start_devices(20, *keys)
    fleet.wait_for_round(fleet.rounds() + 2)
    fleet.signal(coordinator, signal.SIGKILL)
    coordinator.wait(60)
    fleet.start_coordinator("--keys", str(here.path))
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert outcomes_add_up(fleet.rows()) == []
    assert not fleet.summary()["perturbed"]
    assert fleet.summary()["model_digest"] == undisturbed.model_digest


def test_behind_edges_of_which_one_is_killed_they_leave_the_digest(
    tmp_path: Path, undisturbed: Summary, warm: WarmStart
) -> None:
    out = tmp_path / "run"
    settings = [*SHORT.settings, ASLEEP, "fleet.link=shared", "tree.edges=[1,2]"]
    settings += ["runtime.trainers=1", "runtime.report=false"]
    words = [word for setting in settings for word in ("--set", setting)]
    run = warm.start(["run", "digits-small", *words, "--out", str(out)], tmp_path / "log", os.environ)
    while run.is_running() and finished_rounds(out) < 2:
        with contextlib.suppress(psutil.TimeoutExpired):
            run.wait(0.1)
    children = set(run.children(recursive=True))  # some end at any moment, which process_iter bears
    edges = [each for each in psutil.process_iter(["name"]) if each in children and each.info["name"] == "fedemu-edge"]
    assert len(edges) == 3, (tmp_path / "log").read_text()
    edges[-1].kill()
    assert run.wait(300) == 0, (tmp_path / "log").read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert not summary["perturbed"]
    assert summary["model_digest"] == undisturbed.model_digest


def test_a_checkpoint_has_rows_of_the_devices_that_were_asked_and_none_of_the_others(
    tmp_path: Path, in_one_process: Callable[..., Summary]
) -> None:
    few, many = 1_000, 50_000
    sizes, listed = {}, {}
    for devices in (few, many):
        directory = tmp_path / str(devices)
        in_one_process(directory, *TEN_A_ROUND, f"fleet.devices={devices}")
        for round in (3, 4):
            folder = directory / "checkpoint"
            sizes[devices, round] = (folder / record_name(round)).stat().st_size
            listed[devices, round] = _devices_in(read_record(folder, round)["record"]["roster"])
    for devices in (few, many):
        assert len(set(listed[devices, 4])) <= 40, "ten were asked in each of four rounds"
        assert len(listed[devices, 4]) - len(listed[devices, 3]) <= 20, "a round adds ten, and who of them was away"
        assert sizes[devices, 4] - sizes[devices, 3] < 600, "a digest, and less than 25 bytes for each of them"
    assert sizes[many, 4] < 1.1 * sizes[few, 4], "their numbers have two digits more"


def _devices_in(roster: dict[str, Any]) -> list[int]:
    """The numbers of devices in the roster of a checkpoint, as often as they are there."""
    by_digest = [devices for digests in roster["charged"].values() for devices in digests.values()]
    return [device for some in [roster["away"][0], *roster["states"].values(), *by_digest] for device in some]
