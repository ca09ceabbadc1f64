"""The environment variables with which trainers start."""

from __future__ import annotations

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT


def test_trainers_get_one_thread_and_keep_their_memory() -> None:
    assert COMPUTE_ENVIRONMENT["OMP_NUM_THREADS"] == COMPUTE_ENVIRONMENT["MKL_NUM_THREADS"] == "1"
    assert int(COMPUTE_ENVIRONMENT["MALLOC_MMAP_THRESHOLD_"]) > 2**30
