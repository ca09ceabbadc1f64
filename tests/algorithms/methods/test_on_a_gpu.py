"""Programs of all methods on a GPU that only pretends to be there: tensors without values, so no GPU is needed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedemu.algorithms.registry import ALGORITHMS


@pytest.mark.timeout(600)
def test_no_program_mixes_devices_reads_values_or_copies_from_the_gpu() -> None:
    """Each program runs for one device and for a stack. ``fake_gpu.py`` tells why it has a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "fake_gpu.py"), "one that mixes", *ALGORITHMS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    complaints = json.loads(done.stdout)
    mixing = complaints.pop("one that mixes")
    assert len(mixing) == 2
    assert all(re.search(r"found (at least )?two (different )?devices,? gpu:0(,| and) cpu", each) for each in mixing), (
        mixing
    )
    assert {name: found for name, found in complaints.items() if found} == {}
    assert set(complaints) == set(ALGORITHMS)
