"""Whole runs through edges: keys at both sides, and what happens when something dies behind an edge or it does."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from fedemu.coordinator.record.summary import Summary
from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import LiveFleet, finished_rounds
from fedemu.ops.stress.scenarios import SHORT
from fedemu.ops.stress.warm import Started, WarmStart

FleetMaker = Callable[..., LiveFleet]
ONE = ("--trainers", "1", "--per-process", "5")
"""A machine of these tests has one trainer, and few processes for its devices."""


def key_options(folder: KeyFolder, server: str) -> tuple[str, ...]:
    return ("--keys", str(folder.path), "--server-key", server)


def test_an_edge_needs_its_own_approval_and_lets_in_only_machines_that_it_approves_itself(
    new_fleet: FleetMaker, undisturbed: Summary, tmp_path: Path
) -> None:
    top, site, first, second = (KeyFolder(tmp_path / name) for name in ("top", "site", "first", "second"))
    top_key, site_key, first_key = top.new(), site.new(), first.new()
    place = free_address()
    fleet = new_fleet()
    fleet.start_coordinator("--keys", str(top.path))
    top.approve("site", site_key)
    edge = fleet.start_edge(place, *key_options(site, top_key))
    fleet.wait_until(lambda: f"fedemu keys approve NAME '{site_key}' --edge" in fleet.tail(), "a mere machine", 100)
    top.approve("site", site_key, edge=True)
    shut_out = fleet.start_devices(20, *ONE, *key_options(first, site_key), state="first", address=place)
    fleet.wait_until(lambda: f"fedemu keys approve NAME '{first_key}'" in fleet.tail(), "a stranger at the edge", 100)
    assert fleet.rounds() == 0
    assert not (fleet.run_directory / "checkpoint" / "leases.jsonl").exists(), "the coordinator has not heard of it"
    site.approve("first", first_key)
    fleet.wait_for_round(2, 100)
    # The edge looks at its list once a second. It stands still meanwhile, so that the run is not over before.
    fleet.signal(edge, signal.SIGSTOP)
    site.approve("second", second.new())
    site.revoke("first")
    fleet.pause(1.2)
    fleet.signal(edge, signal.SIGCONT)
    assert shut_out.wait(100) == 3
    fleet.start_devices(20, *ONE, *key_options(second, site_key), state="second", address=place)
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert edge.wait(100) == 0
    assert fleet.summary()["model_digest"] == undisturbed.model_digest
    leases = (fleet.run_directory / "checkpoint" / "leases.jsonl").read_text()
    assert f'"{site_key} {first_key}"' in leases
    assert f'"{site_key} {second.pair()[0]}"' in leases


def test_an_edge_that_is_revoked_ends_and_its_machines_are_taken_in_by_another(
    new_fleet: FleetMaker, undisturbed: Summary, tmp_path: Path
) -> None:
    top, site, other = (KeyFolder(tmp_path / name) for name in ("top", "site", "other"))
    top_key = top.new()
    for name, folder in (("site", site), ("other", other)):
        top.approve(name, folder.new(), edge=True)
    fleet = new_fleet()
    fleet.start_coordinator("--keys", str(top.path))
    place = free_address()
    revoked = fleet.start_edge(place, *key_options(site, top_key))
    machine = fleet.start_devices(20, *ONE, *key_options(site, site.pair()[0]), address=place)
    fleet.wait_for_round(2, 100)
    fleet.signal(fleet.coordinator, signal.SIGSTOP)
    top.revoke("site")
    fleet.pause(1.2)
    fleet.signal(fleet.coordinator, signal.SIGCONT)
    assert revoked.wait(100) == 3
    fleet.signal(machine, signal.SIGTERM)
    assert machine.wait(100) in (0, 4)
    place = free_address()
    fleet.start_edge(place, *key_options(other, top_key))
    fleet.start_devices(20, *ONE, *key_options(other, other.pair()[0]), state="other", address=place)
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert fleet.summary()["model_digest"] == undisturbed.model_digest


def test_a_machine_an_edge_in_the_middle_and_one_that_stands_still_leave_the_digest(
    new_fleet: FleetMaker, undisturbed: Summary
) -> None:
    upper, lower = free_address(), free_address()
    fleet = new_fleet()
    fleet.start_coordinator()
    middle = fleet.start_edge(upper)
    leaf = fleet.start_edge(lower, connect=upper)
    fleet.start_devices(8, *ONE, state="upper", address=upper)
    killed = fleet.start_devices(12, *ONE, state="lower", address=lower)
    fleet.wait_for_round(2, 100)
    fleet.signal(killed, signal.SIGKILL)
    fleet.start_devices(12, *ONE, state="lower", address=lower)
    fleet.wait_for_round(5, 100)
    fleet.signal(middle, signal.SIGKILL)
    middle.wait(100)
    fleet.start_edge(upper)
    fleet.wait_for_round(8, 100)
    # Longer than the five heartbeats after which it counts as gone.
    fleet.signal(leaf, signal.SIGSTOP)
    fleet.pause(7.0)
    fleet.signal(leaf, signal.SIGCONT)
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert {process.wait(100) for process in (*fleet.edges[1:], *fleet.supervisors)} <= {0, -signal.SIGKILL}
    assert fleet.summary()["model_digest"] == undisturbed.model_digest
    assert not fleet.summary()["perturbed"]
    assert [event["event"] for event in fleet.events()].count("edge") == 2, "the one in the middle came back"


def name_of(process: psutil.Process) -> str:
    """The name of a process, "" if it has ended meanwhile, as devices do that crash by plan."""
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return ""


def test_a_coordinator_that_was_killed_finds_its_tree_of_edges_again_in_a_resumed_run(
    tmp_path: Path, undisturbed: Summary, warm: WarmStart
) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    settings = [*SHORT.settings, "tree.edges=2", "fleet.link=shared", "runtime.trainers=1", "runtime.report=false"]
    words = [word for setting in settings for word in ("--set", setting)]
    run = warm.start(["run", "digits-small", *words, "--out", str(out)], log, os.environ)
    wait_for_rounds(run, out, 2)
    children = run.children(recursive=True)
    (coordinator,) = (child for child in children if name_of(child).startswith("fedemu-coord"))
    edges = [child for child in children if name_of(child) == "fedemu-edge"]
    assert len(edges) == 2, log.read_text()
    edges[-1].kill()
    wait_for_rounds(run, out, 4)
    children += run.children(recursive=True)
    coordinator.kill()
    assert run.wait(100) != 0
    psutil.wait_procs(children, timeout=30)
    assert not [child for child in children if lives(child)], "nothing is left behind"
    resumed = warm.start(["run", "--resume", str(out), "--set", "runtime.report=false"], log, os.environ)
    assert resumed.wait(300) == 0, log.read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert not summary["perturbed"]
    assert summary["model_digest"] == undisturbed.model_digest


def wait_for_rounds(run: Started, out: Path, rounds: int) -> None:
    deadline = time.monotonic() + 200
    while finished_rounds(out) < rounds:
        assert run.is_running()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
