"""The environment variables with which trainers start."""

from __future__ import annotations

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT, with_large_pages


def test_trainers_get_one_thread_and_keep_their_memory() -> None:
    threads = [COMPUTE_ENVIRONMENT[f"{library}_NUM_THREADS"] for library in ("OMP", "MKL", "OPENBLAS")]
    assert threads == ["1", "1", "1"]
    assert int(COMPUTE_ENVIRONMENT["MALLOC_MMAP_THRESHOLD_"]) > 2**30


def test_trainers_get_large_pages_beside_what_people_tell_glibc() -> None:
    assert "glibc.malloc.hugetlb" in COMPUTE_ENVIRONMENT["GLIBC_TUNABLES"]
    assert with_large_pages("") == "glibc.malloc.hugetlb=1"
    assert with_large_pages("glibc.cpu.hwcaps=-AVX2_Usable") == "glibc.cpu.hwcaps=-AVX2_Usable:glibc.malloc.hugetlb=1"
    assert with_large_pages("glibc.malloc.hugetlb=0") == "glibc.malloc.hugetlb=0"
