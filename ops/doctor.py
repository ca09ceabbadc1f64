"""Looks at a machine the way a fleet will use it, one finding per subject."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import psutil
import zmq
from packaging.requirements import Requirement

from fedemu.ops.datasets_cache import cache_folder

DEVICES = 300
"""What the default experiment asks of a machine."""
PRIVATE_BYTES = 8 * 2**20
"""Private memory that a device process may take at most."""
BASE_BYTES = 2 * 2**30
"""Coordinator, trainers and the decoded data of the shipped presets."""
FILES_PER_DEVICE = 4
"""Sockets and descriptors of a supervisor and a coordinator per device, on one machine."""
_TORCH_SECONDS = 120

Verdict = Literal["ok", "note", "bad"]


class Finding(NamedTuple):
    """``bad`` means that runs will fail here; ``note`` that something optional is missing or small."""

    verdict: Verdict
    subject: str
    detail: str


def examine(environment: Mapping[str, str]) -> list[Finding]:
    """Every finding, in an order that explains itself."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _packages,
        _torch,
        _messaging,
        _open_files,
        _processes,
        _memory,
        _shared_memory,
        lambda: _cache(environment),
        lambda: _data(environment),
        _prometheus,
    ]
    return [check() for check in checks]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding(
        "ok" if fits else "bad", "python", version if fits else f"{version}; fedemu needs 3.11, 3.12 or 3.13"
    )


def _packages() -> Finding:
    """Whether every requirement of the installed package is met."""
    wrong = list(_unmet("fedemu"))
    if wrong:
        return Finding("bad", "packages", f"{', '.join(wrong)}; install fedemu again")
    return Finding("ok", "packages", f"fedemu {metadata.version('fedemu')}, all requirements met")


def _unmet(package: str) -> Iterator[str]:
    for text in metadata.requires(package) or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} is {found} but must be {requirement.specifier}"


def _torch() -> Finding:
    """In a process of its own, because a broken installation may take its process along."""
    code = (
        "import torch\n"
        "devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]\n"
        "assert torch.ones(2).sum().item() == 2\n"
        "print(torch.__version__ + ', ' + (', '.join(devices) or 'no CUDA device: trainers use the CPU'))"
    )
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_TORCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("bad", "torch", f"importing it takes more than {_TORCH_SECONDS} s")
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        return Finding("bad", "torch", lines[-1] if lines else f"importing it ends with code {ended.returncode}")
    return Finding("ok", "torch", ended.stdout.strip())


def _messaging() -> Finding:
    most = zmq.Context.instance().get(zmq.SOCKET_LIMIT)
    return Finding("ok", "zeromq", f"libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}, {most} sockets at most")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = DEVICES * FILES_PER_DEVICE
    if hard != resource.RLIM_INFINITY and hard < needed:
        return Finding(
            "bad", "open files", f"at most {hard}; {DEVICES} devices need {needed}: raise the hard limit (ulimit -Hn)"
        )
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return Finding("ok", "open files", f"{soft} now, {most} at most (raised when needed)")


def _processes() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [limit for limit in (_number(Path("/proc/sys/kernel/pid_max")), _control_group("pids.max")) if limit]
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    room = min(limits, default=0)
    if room and room < DEVICES + 100:
        return Finding(
            "bad",
            "processes",
            f"at most {room}; a process per device needs {DEVICES + 100}: use --per-process, or raise ulimit -u",
        )
    return Finding("ok", "processes", f"at most {room}" if room else "unlimited")


def _memory() -> Finding:
    free = psutil.virtual_memory().available
    limit = _control_group("memory.max")
    if limit:
        free = min(free, limit - (_control_group("memory.current") or 0))
    room = max(0, int((free - BASE_BYTES) // PRIVATE_BYTES))
    detail = f"{free / 2**30:.1f} GiB free: room for about {room:,} devices in processes of their own"
    if room < DEVICES:
        return Finding("note", "memory", f"{detail}; use --per-process for larger fleets")
    return Finding("ok", "memory", detail)


def _shared_memory() -> Finding:
    temporary = Path(os.environ.get("TMPDIR", "/tmp"))
    free = shutil.disk_usage(temporary).free
    if free < 2**30:
        return Finding("note", "temporary files", f"{free / 2**20:.0f} MiB free in {temporary}; large models need more")
    return Finding("ok", "temporary files", f"{free / 2**30:.1f} GiB free in {temporary}")


def _cache(environment: Mapping[str, str]) -> Finding:
    folder = cache_folder(environment)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("bad", "data cache", f"{folder} can't be written; set FEDEMU_CACHE to a folder that can")
    return Finding("ok", "data cache", f"{folder}, {shutil.disk_usage(existing).free / 2**30:.1f} GiB free")


def _data(environment: Mapping[str, str]) -> Finding:
    chosen = environment.get("FEDEMU_DATA")
    if not chosen:
        return Finding("note", "data folder", "FEDEMU_DATA is not set; digits is built in, others come by id or path")
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        return Finding("bad", "data folder", f"FEDEMU_DATA = {chosen} is no folder; correct or unset it")
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    return Finding("ok", "data folder", f"{folder}: {', '.join(names) or 'empty'}")


def _prometheus() -> Finding:
    found = shutil.which("prometheus")
    if found is None:
        return Finding("note", "prometheus", "not installed; only needed to collect metrics")
    return Finding("ok", "prometheus", found)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _control_group(name: str) -> int | None:
    """A limit of this process's control group (version 2); None where there is none."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
    except OSError:
        return None
    return _number(Path("/sys/fs/cgroup") / own.lstrip("/") / name)
