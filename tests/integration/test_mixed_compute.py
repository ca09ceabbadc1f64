"""Machines that would compute differently, as real processes: refused, behind an edge too, or told of at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest

from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.warm import WarmStart
from fedemu.protocol.host.hardware import processor

OTHER: Final[Mapping[str, str]] = {"ATEN_CPU_CAPABILITY": "default"}
"""What makes a machine with AVX2 compute in another way."""
ONE = ("--trainers", "1", "--per-process", "2")


@pytest.mark.skipif("avx2" not in processor().get("flags", ""), reason="torch has one way to compute here")
def test_a_machine_that_computes_otherwise_is_refused_unless_it_is_allowed(
    new_fleet: Callable[..., LiveFleet], warm: WarmStart, tmp_path: Path
) -> None:
    fleet = new_fleet("rounds=1", "fleet.devices=4", "fleet.per_round=4", "availability={kind='always'}")
    fleet.start_coordinator()
    below = free_address()
    edge = warm.start(["edge", "--connect", fleet.address, "--bind", below], tmp_path / "edge.log", os.environ)
    fleet.start_devices(2, *ONE, state="a", address=below)
    fleet.wait_until(lambda: any(event["event"] == "enroll" for event in _events(fleet)), "the first machine", 300)
    other = fleet.start_devices(2, *ONE, state="b", address=below, environment=OTHER)
    assert other.wait(300) == 3
    assert "instructions DEFAULT instead of " in fleet.log_of(other).read_text()
    fleet.start_devices(2, *ONE, state="b")
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert edge.wait(300) == 0
    computed = fleet.summary()["compute"]
    assert (computed["mixed"], len(computed["machines"]), len(computed["coordinator"])) == (False, 1, 1)

    elsewhere = fleet.start_coordinator("--rounds", "2", environment=OTHER)
    assert fleet.wait_for_end() == 2
    assert "instructions DEFAULT instead of " in fleet.log_of(elsewhere).read_text()

    allowed = fleet.start_coordinator("--rounds", "2", "--set", "runtime.mixed_compute=true", environment=OTHER)
    fleet.start_devices(2, *ONE, state="a")
    fleet.start_devices(2, *ONE, state="b", environment=OTHER)
    assert fleet.wait_for_end() == 0, fleet.tail()
    computed = fleet.summary()["compute"]
    assert (computed["mixed"], len(computed["machines"]), len(computed["coordinator"])) == (True, 2, 2)
    assert [event["detail"] for event in fleet.events() if event["event"] == "mixed_compute"] == [
        f"instructions DEFAULT instead of {computed['machines'][0]['instructions']}"
    ]
    assert "machines that compute differently took part" in fleet.log_of(allowed).read_text()


def _events(fleet: LiveFleet) -> list[dict[str, object]]:
    return fleet.events() if (fleet.run_directory / "events.jsonl").exists() else []
