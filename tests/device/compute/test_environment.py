"""The environment variables with which trainers start."""

from __future__ import annotations

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT


def test_trainers_get_one_thread_and_keep_their_memory() -> None:
    threads = [COMPUTE_ENVIRONMENT[f"{library}_NUM_THREADS"] for library in ("OMP", "MKL", "OPENBLAS")]
    assert threads == ["1", "1", "1"]
    assert int(COMPUTE_ENVIRONMENT["MALLOC_MMAP_THRESHOLD_"]) > 2**30
