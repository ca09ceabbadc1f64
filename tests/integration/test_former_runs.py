"""Runs of fedemu 0.1.0 still resume and compare, as CHANGELOG.md promises.

``run_of_0_1_0`` holds one experiment (SCAFFOLD, whose devices keep own states) that 0.1.0 itself played to its end, and
once more until it was stopped in round 3. Blobs and logs are left out.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file

from fedemu.coordinator.record.run import read_run
from fedemu.ops.compare.compare import compare
from fedemu.ops.experiment.sources import read_frozen, write_frozen
from fedemu.ops.stress.warm import WarmStart

COMPLETED, INTERRUPTED = (Path(__file__).parent / "run_of_0_1_0" / name for name in ("completed", "interrupted"))


def test_a_run_of_0_1_0_goes_on_to_the_end_to_which_0_1_0_came(tmp_path: Path, warm: WarmStart) -> None:
    shutil.copytree(INTERRUPTED, tmp_path / "run")
    words = ["run", "--resume", str(tmp_path / "run"), "--transport", "memory", "--set", "runtime.report=false"]
    assert warm.start(words, tmp_path / "log", os.environ).wait(300) == 0, (tmp_path / "log").read_text()
    resumed, completed = read_run(tmp_path / "run"), read_run(COMPLETED)
    assert resumed.summary is not None
    assert completed.summary is not None
    assert not resumed.summary["perturbed"], "the own states of devices were found"
    assert (
        resumed.summary["totals"].items()
        >= {name: number for name, number in completed.summary["totals"].items() if not name.startswith("wire")}.items()
    )
    assert [row.virtual_time for row in resumed.rows] == [row.virtual_time for row in completed.rows]
    assert [event["round"] for event in resumed.events if event["event"] == "arithmetic"] == [2]
    # Other processors round otherwise, so the bits need not be the same.
    ends = [load_file(folder / "model.safetensors") for folder in (tmp_path / "run", COMPLETED)]
    torch.testing.assert_close(*ends, rtol=0, atol=1e-4)


def test_a_run_of_0_1_0_is_a_run_of_the_same_experiment(tmp_path: Path) -> None:
    """A setting that 0.1.0 did not know has its default there."""
    later = shutil.copytree(COMPLETED, tmp_path / "later")
    write_frozen(read_frozen(COMPLETED).model_copy(update={"seed": 2}), later)
    compared = compare([COMPLETED, later])
    assert compared.warnings == ()
    assert [entry.seeds for entry in compared.entries] == [(1, 2)]
    assert [len(entry.figures["final_accuracy"].values) for entry in compared.entries] == [2]
