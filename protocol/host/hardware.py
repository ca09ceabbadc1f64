"""What the kernel tells of a machine's name, processors and GPUs, and of the control groups that limit a process.

Nothing is loaded for it.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

CPUINFO: Final = Path("/proc/cpuinfo")
NVIDIA: Final = Path("/proc/driver/nvidia")
GROUPS = Path("/sys/fs/cgroup")
"""The control groups of the machine."""
OWN_GROUPS = Path("/proc/self/cgroup")
"""The control groups of this process, a line for each tree of them."""
CUBLAS_WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
FIXED_WORKSPACE: Final = ":4096:8"
"""The workspace of cuBLAS: eight buffers of 4,096 KiB."""


def host_name() -> str:
    """The name of this machine, at most 256 characters. Bytes that are no UTF-8 become a mark in their places."""
    return os.fsencode(os.uname().nodename).decode(errors="replace")[:256]


def processor(path: Path = CPUINFO) -> dict[str, str]:
    """The facts of the first processor, such as ``vendor_id`` and ``flags``. Empty where the kernel tells none."""
    try:
        first = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): fact.strip() for name, _, fact in pairs}


def graphics(folder: Path = NVIDIA) -> dict[str, Any]:
    """The models of this machine's ``gpus`` and the version of their ``driver``. Empty without NVIDIA's driver."""
    try:
        version = (folder / "version").read_text(encoding="utf-8", errors="replace")
        told = [path.read_text(encoding="utf-8", errors="replace") for path in folder.glob("gpus/*/information")]
    except OSError:
        return {}
    models = re.findall(r"^Model:\s*(.+?)\s*$", "\n".join(told), re.MULTILINE)
    driver = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", version)
    return {"gpus": sorted(models), "driver": driver[1] if driver else "unknown"}


def settle_gpu_libraries() -> None:
    """Have the libraries of a GPU multiply in one way, whatever the environment says in which this process was started.

    cuBLAS is deterministic only with a workspace of fixed size. The variables that go have no setting in an experiment,
    and change the bits of products: one rounds their inputs to TF32 everywhere or nowhere, whatever torch was told. The
    libraries read all of them at their first use.
    """
    os.environ[CUBLAS_WORKSPACE] = FIXED_WORKSPACE
    for name in ("CUBLASLT_WORKSPACE_SIZE", "NVIDIA_TF32_OVERRIDE"):
        os.environ.pop(name, None)


def cores() -> int:
    """The number of cores that this process may use: those that it may run on, or as many as a container's quota is.

    A part of a core counts as one.
    """
    try:
        allowed = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # a system without it, or a sandbox that refuses it
        allowed = os.cpu_count() or 1
    quotas = [quota for folder in control_groups("cpu") if (quota := _quota(folder)) is not None]
    return max(1, min([allowed, *map(math.ceil, quotas)]))


def _quota(group: Path) -> float | None:
    """The processor seconds in a second that a control group has, None if it has all."""
    with suppress(OSError, ValueError):
        most, each = (group / "cpu.max").read_text().split()
        return None if most == "max" else int(most) / int(each)
    granted, period = kernel_number(group / "cpu.cfs_quota_us"), kernel_number(group / "cpu.cfs_period_us")
    return granted / period if granted and period and granted > 0 else None


def control_groups(controller: str) -> list[Path]:
    """The folders of this process's control groups that may limit what ``controller`` counts, and of those above them.

    Version 2 has one tree of groups, version 1 one for each controller or for several. A system may have both.
    """
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            root = GROUPS / controllers
            folder = root / place.lstrip("/")
            found += [folder, *[parent for parent in folder.parents if parent == root or root in parent.parents]]
    return found


def kernel_number(*paths: Path) -> int | None:
    """The number in the first of these files of the kernel that has one; None if there is none, or it says ``max``."""
    for path in paths:
        with suppress(OSError, ValueError):
            return int(path.read_text())
    return None
