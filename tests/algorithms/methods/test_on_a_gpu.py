"""Programs and server jobs of all methods on a GPU that only pretends to be there, so that no GPU is needed.

``fake_gpu.py`` and ``fake_gpu_with_values.py`` tell why they have processes of their own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedemu.algorithms.registry import ALGORITHMS

MIXED = "one that mixes"


def found_by(script: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), *ALGORITHMS, MIXED],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    assert set(found) == {MIXED, *ALGORITHMS}
    return found


@pytest.mark.timeout(600)
def test_no_program_mixes_devices_reads_values_or_copies_from_the_gpu() -> None:
    complaints = found_by("fake_gpu.py")
    [mixing] = complaints.pop(MIXED)
    assert re.search(r"found (at least )?two (different )?devices,? gpu:0(,| and) cpu", mixing)
    assert {name: found for name, found in complaints.items() if found} == {}


def test_a_server_job_on_a_gpu_mixes_no_devices_and_ends_with_the_same_values() -> None:
    found = found_by("fake_gpu_with_values.py")
    mixing, _, _ = found.pop(MIXED)
    assert mixing == ["distillation: RuntimeError: aten.mul.Tensor mixes devices"] * 2
    assert {name: complaints for name, (complaints, _, _) in found.items() if complaints} == {}
    with_jobs = {name for name, (_, jobs, _) in found.items() if jobs}
    by_sgd = {"central", "fedavg_finetuned", "flashback", "fedcil"}
    assert with_jobs == {*by_sgd, "feddf", "mfcl", "fedavg_gen", "target", "lander"}
    assert {name for name, (_, _, replays) in found.items() if replays > 2} == with_jobs
