"""Programs and server jobs of all methods on a GPU that only pretends to be there, so that no GPU is needed.

``fake_gpu.py`` tells why this has a process of its own.
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


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What was found of programs and of server jobs, by method."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "fake_gpu.py"), *ALGORITHMS, MIXED],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    told: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert set(told["programs"]) == set(told["jobs"]) == {MIXED, *ALGORITHMS}
    return told


@pytest.mark.timeout(600)
def test_no_program_mixes_devices_reads_values_or_copies_from_the_gpu(found: dict[str, dict[str, Any]]) -> None:
    complaints = found["programs"]
    [mixing] = complaints[MIXED]
    assert re.search(r"found (at least )?two (different )?devices,? gpu:0(,| and) cpu", mixing)
    assert {name for name, said in complaints.items() if said} == {MIXED}, complaints


@pytest.mark.timeout(600)
def test_a_server_job_on_a_gpu_mixes_no_devices_and_ends_with_the_same_values(found: dict[str, dict[str, Any]]) -> None:
    jobs = found["jobs"]
    mixing, _, _ = jobs[MIXED]
    assert mixing == ["distillation: RuntimeError: aten.mul.Tensor mixes devices"] * 2
    assert {name for name, (complaints, _, _) in jobs.items() if complaints} == {MIXED}, jobs
    ordinary = {name: told for name, told in jobs.items() if name != MIXED}
    with_jobs = {name for name, (_, computed, _) in ordinary.items() if computed}
    by_sgd = {"central", "fedavg_finetuned", "flashback", "fedcil"}
    assert with_jobs == {*by_sgd, "feddf", "mfcl", "fedavg_gen", "target", "lander"}
    assert {name for name, (_, _, replays) in ordinary.items() if replays > 2} == with_jobs
