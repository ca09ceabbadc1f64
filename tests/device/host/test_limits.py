"""What a machine needs for its devices, and the sentences that say what it lacks."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedemu.device.host import limits
from fedemu.device.host.limits import (
    PACK,
    MachineLimits,
    allow_files,
    check,
    demand,
    only_free_memory,
    pack_size,
    this_machine,
)
from fedemu.device.host.processors import default_trainers
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host import hardware
from fedemu.protocol.host.open_files import UNLIMITED, allow_open_files

LARGE = MachineLimits(files_hard=10**6, threads=10**6, memory=2**40)


def test_a_large_machine_holds_a_thousand_devices() -> None:
    check(1000, 1, 2, LARGE)


def test_what_the_system_does_not_tell_is_no_obstacle() -> None:
    check(1000, 1, 2, MachineLimits(files_hard=10**6, threads=None, memory=None))


def test_packing_saves_processes_and_memory() -> None:
    _, threads, memory = demand(1000, 1, 1)
    _, packed_threads, packed_memory = demand(1000, 50, 1)
    assert packed_threads < threads / 10
    assert packed_memory < memory / 5


def test_fifty_devices_are_awake_in_a_process_unless_the_user_says_how_many() -> None:
    assert (pack_size(1), pack_size(2), PACK) == (50, 2, 50)


def test_too_few_descriptors_say_how_many_and_how() -> None:
    files, _, _ = demand(1000, 1, 2)
    machine = MachineLimits(files_hard=1024, threads=None, memory=None)
    with pytest.raises(ConfigurationError, match=rf"1000 devices need {files} open files.*at most 1024.*ulimit -Hn"):
        check(1000, 1, 2, machine)


def test_too_few_processes_say_how_to_pack() -> None:
    machine = MachineLimits(files_hard=10**6, threads=132, memory=None)
    for keys, packing in ((False, 10), (True, 31)):
        with pytest.raises(ConfigurationError, match=rf"only 132 more can be started.*--per-process {packing}\.$"):
            check(1000, 1, 2, machine, keys)
        check(1000, packing, 2, machine, keys)


def test_devices_are_not_to_be_packed_where_that_would_not_help() -> None:
    with pytest.raises(ConfigurationError, match=r"only 32 more can be started; raise the limit \([^)]*\)\.$"):
        check(20, 1, 2, MachineLimits(files_hard=10**6, threads=32, memory=None))


def test_a_device_process_has_one_thread_and_three_with_keys() -> None:
    limit = MachineLimits(files_hard=10**6, threads=300 + 24, memory=None)
    check(300, 1, 1, limit)
    with pytest.raises(ConfigurationError, match="300 devices need 924 processes and threads"):
        check(300, 1, 1, limit, keys=True)


def test_too_little_memory_says_how_much() -> None:
    with pytest.raises(ConfigurationError, match=r"need about \d+\.\d GiB of memory, but 1\.0 GiB are available"):
        check(1000, 1, 2, MachineLimits(files_hard=10**6, threads=None, memory=2**30))


def test_the_soft_limit_is_raised_as_far_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 10**6))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: raised.append(pair))
    allow_files(300, 1, 2)
    assert raised == [(demand(300, 1, 2)[0], 10**6)]


def test_this_machine_can_be_read() -> None:
    machine = this_machine()
    assert machine.files_hard > 0
    assert machine.memory is None or machine.memory > 0
    assert machine.threads is None or machine.threads > 0


@pytest.mark.parametrize("empty", [False, True])
def test_a_system_without_proc_tells_neither_memory_nor_threads(
    empty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if empty:  # /proc is there and empty, as in a chroot
        (tmp_path / "proc").mkdir()
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    monkeypatch.setattr(hardware, "OWN_GROUPS", tmp_path / "proc" / "cgroup")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(limits, "kernel_number", lambda path: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert this_machine() == MachineLimits(files_hard=100, threads=None, memory=None)


def test_a_sandbox_that_tells_neither_limits_nor_cores_is_taken_to_have_no_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> Any:
        raise PermissionError(1, "Operation not permitted")

    for module, name in ((resource, "getrlimit"), (resource, "setrlimit"), (os, "sched_getaffinity")):
        monkeypatch.setattr(module, name, refused)
    assert this_machine().files_hard == allow_open_files(10**6) == UNLIMITED
    with only_free_memory():
        np.empty(2**20, np.uint8)
    assert 1 <= hardware.cores() <= (os.cpu_count() or 1)


def test_no_more_than_the_free_memory_is_allocated_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_memory", lambda: 2**28)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with only_free_memory():
        np.empty(2**27, np.uint8)
        with only_free_memory():
            np.empty(2**27, np.uint8)
        with pytest.raises(MemoryError):
            np.empty(2**29, np.uint8)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    np.empty(2**29, np.uint8)


def in_groups(folder: Path, lines: str, files: Mapping[str, str], patch: pytest.MonkeyPatch) -> MachineLimits:
    """The limits of a process whose control groups are told by ``lines``, with these files under their root."""
    (folder / "own").write_text(lines)
    for name, text in files.items():
        (folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "groups" / name).write_text(text)
    patch.setattr(hardware, "OWN_GROUPS", folder / "own")
    patch.setattr(hardware, "GROUPS", folder / "groups")
    return this_machine()


def test_files_that_a_container_keeps_in_memory_do_not_count_as_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "box/memory.max": "900000\n",
        "box/memory.current": "890000\n",
        "box/memory.stat": "anon 90000\nfile 800000\nshmem 100000\ninactive_file 600000\nactive_file 100000\n",
        "box/pids.max": "70\n",
        "box/pids.current": "12\n",
        "memory.max": "max\n",
    }
    machine = in_groups(tmp_path, "0::/box\n", files, monkeypatch)
    assert (machine.memory, machine.threads) == (900_000 - 190_000, 58)


def test_limits_of_control_groups_of_version_1_count_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "memory/job/memory.limit_in_bytes": "800000\n",
        "memory/job/memory.usage_in_bytes": "300000\n",
        "memory/job/memory.stat": "inactive_file 0\ntotal_inactive_file 50000\ntotal_active_file 10000\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "pids/job/pids.max": "70\n",
        "pids/job/pids.current": "12\n",
    }
    machine = in_groups(tmp_path, "8:pids:/job\n4:memory:/job/step\n0::/\n", files, monkeypatch)
    assert (machine.memory, machine.threads) == (800_000 - 240_000, 58)


@pytest.mark.parametrize(
    ("lines", "files", "expected"),
    [
        ("0::/box\n", {}, 12),
        ("0::/box\n", {"box/cpu.max": "max 100000\n", "cpu.max": "max 100000\n"}, 12),
        ("0::/box/in\n", {"box/in/cpu.max": "400000 100000\n", "box/cpu.max": "250000 100000\n"}, 3),
        ("0::/box\n", {"box/cpu.max": "5000 100000\n"}, 1),
        ("0::/box\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/pods:engine:7\n", {"pods:engine:7/cpu.max": "250000 100000\n"}, 3),
        ("0::/box\n", {"box/cpu.max": "2000000 100000\n"}, 12),
        (
            "4:cpu,cpuacct:/job\n",
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "-1", "cpu,cpuacct/job/cpu.cfs_period_us": "1"},
            12,
        ),
        ("4:cpu,cpuacct:/j\n", {"cpu,cpuacct/j/cpu.cfs_quota_us": "90", "cpu,cpuacct/j/cpu.cfs_period_us": "30"}, 3),
    ],
)
def test_a_process_has_the_cores_that_it_may_run_on_and_that_its_container_may_use(
    lines: str, files: Mapping[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(12)))
    in_groups(tmp_path, lines, files, monkeypatch)
    assert hardware.cores() == expected
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert default_trainers("auto") == expected


@pytest.mark.parametrize(("counted", "expected"), [(6, 6), (None, 1)])
def test_a_system_without_affinity_and_control_groups_has_the_cores_that_it_counts(
    counted: int | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: counted)
    monkeypatch.setattr(hardware, "OWN_GROUPS", tmp_path / "missing")
    assert hardware.cores() == expected
