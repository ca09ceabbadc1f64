from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from fedemu.device.compute.rule import COMPUTE_ENVIRONMENT, DeviceType, Kind, compute_rule


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("device_type", get_args(DeviceType))
def test_there_is_a_rule_for_every_kind_of_model_and_device(kind: Kind, device_type: DeviceType) -> None:
    executor, stack_size = compute_rule(kind, device_type)
    assert stack_size >= 2 if executor == "vmapped" else stack_size == 1


def test_trainers_get_one_thread_and_keep_their_memory() -> None:
    assert COMPUTE_ENVIRONMENT["OMP_NUM_THREADS"] == COMPUTE_ENVIRONMENT["MKL_NUM_THREADS"] == "1"
    assert int(COMPUTE_ENVIRONMENT["MALLOC_MMAP_THRESHOLD_"]) > 2**30


def test_the_rule_is_read_without_torch() -> None:
    code = "import sys, fedemu.device.compute.rule; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
