"""Methods whose devices or server keep something between rounds, on a real fleet under churn.

Processes are killed, and the final model is that of an undisturbed run.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.record.summary import Summary
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.invariants import outcomes_add_up
from fedemu.ops.stress.scenarios import SHORT

ROUNDS = 10
CHURN = (
    f"rounds={ROUNDS}",
    "availability={kind='exponential', mean_online=600.0, mean_offline=300.0}",
    "faults.crash_rate=0.1",
    *SHORT.overrides[1:],
    # Methods treat momentum and weight decay differently, so both are set. A small model is enough to test processes.
    "local.momentum=0.5",
    "local.weight_decay=1e-4",
    "local.lr=0.05",
    "model.hidden=[16]",
)
PUBLIC = "data.public={fraction=0.1}"
METHODS = {
    "scaffold": (),
    "flashback": (PUBLIC, "algorithm.options.server_epochs=3"),
}
KEEP_STATE = {"scaffold"}
"""The method among them whose devices keep something. What that is does not matter to those who keep it."""


def settings(name: str) -> tuple[str, ...]:
    return (*CHURN, f"algorithm.name='{name}'", *METHODS[name])


@pytest.mark.parametrize("name", sorted(METHODS))
def test_kills_of_devices_trainers_and_the_coordinator_leave_the_model_as_it_would_be(
    name: str, tmp_path: Path, new_fleet: Callable[..., LiveFleet], in_one_process: Callable[..., Summary]
) -> None:
    expected = in_one_process(tmp_path / "undisturbed", *settings(name))
    fleet = new_fleet(*settings(name))
    coordinator = fleet.start_coordinator()
    fleet.start_devices(SHORT.devices, "--trainers", "1")
    fleet.wait_for_round(2)
    for process in fleet.processes("device")[::3]:
        fleet.signal(process, signal.SIGKILL)
    fleet.wait_for_round(3)
    for process in fleet.processes("trainer"):
        fleet.signal(process, signal.SIGKILL)
    fleet.wait_for_round(4)
    fleet.signal(coordinator, signal.SIGKILL)
    coordinator.wait(300)
    fleet.start_coordinator()
    assert fleet.wait_for_end() == 0, fleet.tail()
    rows, summary = fleet.rows(), fleet.summary()
    assert (len(rows), summary["perturbed"]) == (ROUNDS, False)
    assert outcomes_add_up(rows) == []
    assert sum(row.outcomes["dropped"] for row in rows) > 0, "the churn shows"
    assert summary["model_digest"] == expected.model_digest
    assert any(_own_states(fleet)) == (name in KEEP_STATE)


def _own_states(fleet: LiveFleet) -> list[Any]:
    return list(fleet.run_directory.parent.glob("state/**/own-*.safetensors"))
