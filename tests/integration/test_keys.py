"""A whole run with keys: a machine that is let in late, one that is shut out, and one that takes its places."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from fedemu.coordinator.record.summary import Summary
from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.stress.fleet import LiveFleet

FleetMaker = Callable[..., LiveFleet]


def test_keys_admit_and_shut_out_machines_in_a_run_and_do_not_change_its_result(
    new_fleet: FleetMaker, undisturbed: Summary, tmp_path: Path
) -> None:
    here, first, second = (KeyFolder(tmp_path / name) for name in ("here", "first", "second"))
    server = here.new()
    fleet = new_fleet()
    fleet.start_coordinator("--keys", str(here.path))
    key = first.new()
    own = ("--trainers", "1", "--per-process", "5", "--keys", str(first.path), "--server-key", server)
    shut_out = fleet.start_devices(20, *own, state="first")
    fleet.wait_until(lambda: f"fedemu keys approve NAME '{key}'" in fleet.tail(), "that the key is not approved", 300)
    assert fleet.rounds() == 0
    here.approve("first", key)
    fleet.wait_for_round(2, 300)
    # The coordinator looks at its list once a second. It stands still meanwhile, so that the run is not over before.
    fleet.signal(fleet.coordinator, signal.SIGSTOP)
    here.approve("second", second.new())
    here.revoke("first")
    fleet.pause(1.2)
    fleet.signal(fleet.coordinator, signal.SIGCONT)
    assert shut_out.wait(300) == 3
    other = ("--trainers", "1", "--per-process", "5", "--keys", str(second.path), "--server-key", str(here.public_file))
    fleet.start_devices(20, *other, state="second")
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert {"revoked"} <= {event["event"] for event in fleet.events()}
    assert fleet.summary()["model_digest"] == undisturbed.model_digest
