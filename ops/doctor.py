"""Checks whether a machine can run a fleet. There is one finding for each subject."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, NamedTuple

import zmq
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from fedemu.device.host import limits
from fedemu.device.host.processors import default_trainers
from fedemu.ops.extras import EXTRAS
from fedemu.ops.homes import cache_folder, expanded
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.paths import exists, is_folder
from fedemu.protocol.host.private import temporary_folder

DEVICES = 300
"""The number of devices for which the limits of the machine are checked: that of the default experiment."""
_TORCH_SECONDS = 120
_TRY_TORCH: Final = """\
import json, torch
assert torch.ones(2).sum().item() == 2
counted, error = torch.cuda.device_count(), ""
if counted and not torch.cuda.is_available():
    counted, error = 0, "no reason is told"
    try:
        torch.cuda.init()
    except Exception as raised:
        error = str(raised) or error
print(json.dumps([torch.__version__, [torch.cuda.get_device_name(i) for i in range(counted)], error]))
"""
"""It tells the version of torch, the GPUs that it opens, and why it opens none although the driver counts some."""

Verdict = Literal["ok", "note", "bad"]


class Finding(NamedTuple):
    """One result. ``bad`` means that runs will fail here, ``note`` that something optional is missing or small."""

    verdict: Verdict
    subject: str
    detail: str


def examine(environment: Mapping[str, str]) -> list[Finding]:
    """Check everything, and return all findings. Raises FileNotFoundError if the working folder was removed."""
    os.getcwd()  # a process that is started there to try torch would fail, whatever torch is like
    return [
        _python(),
        _packages(),
        _torch(),
        _compiled(),
        _messaging(),
        *_limits(),
        _temporary_files(),
        _cache(environment),
        _data(environment),
        *_extras(),
        _prometheus(),
    ]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    needed = SpecifierSet(metadata.metadata("fedemu")["Requires-Python"])
    if needed.contains(version):
        return Finding("ok", "python", version)
    return Finding("bad", "python", f"{version} but must be {needed}; make a virtual environment with such a Python")


def _packages() -> Finding:
    """Whether every requirement of the installed package is met."""
    wrong = list(_unmet(_required()))
    if wrong:
        return Finding("bad", "packages", f"{', '.join(wrong)}; install fedemu again: pip install --upgrade fedemu")
    return Finding("ok", "packages", f"fedemu {metadata.version('fedemu')}, all requirements met")


def _required(extra: str = "") -> Iterator[Requirement]:
    """What fedemu requires here, or what one of its extras requires besides."""
    for requirement in map(Requirement, metadata.requires("fedemu") or []):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            wanted = not extra
        else:
            wanted = bool(extra) and marker.evaluate({"extra": extra})
        if wanted:
            yield requirement


def _unmet(required: Iterable[Requirement]) -> Iterator[str]:
    for requirement in required:
        try:
            found = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            yield f"{requirement.name} is missing"
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            yield f"{requirement.name} is {found} but must be {requirement.specifier}"


def _torch() -> Finding:
    """Import torch in a process of its own, because a broken installation may crash the process."""
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _TRY_TORCH],
            capture_output=True,
            text=True,
            timeout=_TORCH_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(
            "bad",
            "torch",
            f"importing it takes more than {_TORCH_SECONDS} s; look for what keeps this machine busy, and try again",
        )
    if ended.returncode != 0:
        lines = ended.stderr.strip().splitlines()
        said = lines[-1] if lines else f"importing it ends with code {ended.returncode}"
        return Finding("bad", "torch", f"{said}; install it again: pip install --force-reinstall torch")
    version, devices, error = json.loads(ended.stdout.splitlines()[-1])
    if error:
        reason = error.splitlines()[0].partition(". ")[0]
        closed = f"there is a GPU, but torch cannot open it ({reason}): trainers use the CPU"
        return Finding("note", "torch", f"{version}, {closed}; to use the GPU, mend its driver")
    return Finding("ok", "torch", f"{version}, {', '.join(devices) or 'no CUDA device: trainers use the CPU'}")


def _compiled() -> Finding:
    """Whether Python keeps compiled modules. If not, each process compiles all that it imports."""
    torch = importlib.util.find_spec("torch")
    cached = None if torch is None or torch.cached is None else Path(torch.cached)
    if cached is None or exists(cached):
        return Finding("ok", "compiled modules", "Python keeps them, so processes start quickly")
    library = cached.parent.parent.parent
    compiling = f"make them once: {sys.executable} -m compileall -q {library}"
    slow = "processes take twice as long to start"
    if sys.dont_write_bytecode:
        return Finding(
            "note", "compiled modules", f"none, as PYTHONDONTWRITEBYTECODE says; {slow}; unset it, or {compiling}"
        )
    if not os.access(cached.parent.parent, os.W_OK):
        return Finding("note", "compiled modules", f"none, because {library} can't be written; {slow}; {compiling}")
    return Finding("ok", "compiled modules", "the first run makes them, and takes a few seconds more")


def _messaging() -> Finding:
    most = zmq.Context.instance().get(zmq.SOCKET_LIMIT)
    have = f"libzmq {zmq.zmq_version()}, pyzmq {zmq.pyzmq_version()}, {most} sockets at most"
    if not zmq.has("curve"):
        return Finding(
            "note",
            "zeromq",
            f"{have}, but no CURVE, so machines cannot use keys; install the wheel of pyzmq: pip install pyzmq",
        )
    return Finding("ok", "zeromq", have)


def _limits() -> list[Finding]:
    """Compare the limits of this machine with what a fleet needs. A supervisor does the same before it starts one."""
    machine, trainers = limits.this_machine(), default_trainers("auto")
    files, threads, memory = limits.demand(DEVICES, 1, trainers)
    found = []
    for subject, needed, there, unit, advice in (
        ("open files", files, machine.files_hard, 1, f"raise the hard limit (ulimit -Hn {files})"),
        ("processes", threads, machine.threads, 1, "raise ulimit -u or the container's pids.max, or use --per-process"),
        ("memory", memory, machine.memory, 2**30, "start fewer devices, or pack them with --per-process"),
    ):
        amount = f"{needed:,}" if unit == 1 else f"{needed / unit:.1f} GiB"
        if there is None:
            found.append(
                Finding("note", subject, f"this system does not tell; see that {DEVICES} devices have {amount}")
            )
            continue
        has = f"{there:,}" if unit == 1 else f"{there / unit:.1f} GiB"
        detail = f"{has} available, {DEVICES} devices need {amount}"
        found.append(
            Finding("bad", subject, f"{detail}: {advice}") if there < needed else Finding("ok", subject, detail)
        )
    return found


def _temporary_files() -> Finding:
    try:
        temporary = temporary_folder()
    except FedemuError as error:
        return Finding("bad", "temporary files", str(error))
    free = shutil.disk_usage(temporary).free
    if free < 2**30:
        return Finding(
            "note",
            "temporary files",
            f"{free / 2**20:.0f} MiB free in {temporary}; large models need more: make room, or set TMPDIR",
        )
    return Finding("ok", "temporary files", f"{free / 2**30:.1f} GiB free in {temporary}")


def _cache(environment: Mapping[str, str]) -> Finding:
    try:
        folder = cache_folder(environment)
    except ConfigurationError as error:
        return Finding("bad", "data cache", str(error))
    try:
        existing = next(path for path in (folder, *folder.parents) if exists(path))
    except OSError as error:
        return Finding("bad", "data cache", f"{folder}: {error.strerror}; set FEDEMU_CACHE to another folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        return Finding("bad", "data cache", f"{folder} can't be written; set FEDEMU_CACHE to a folder that can")
    return Finding("ok", "data cache", f"{folder}, {shutil.disk_usage(existing).free / 2**30:.1f} GiB free")


def _data(environment: Mapping[str, str]) -> Finding:
    chosen = environment.get("FEDEMU_DATA")
    if not chosen:
        return Finding(
            "note",
            "data folder",
            "FEDEMU_DATA is not set; digits is built in; for others set it to their folder, or name an id or a path",
        )
    try:
        folder = expanded(chosen)
        if not is_folder(folder):
            return Finding("bad", "data folder", f"FEDEMU_DATA = {chosen} is no folder; correct or unset it")
        names = sorted(path.name for path in folder.iterdir() if is_folder(path))
    except OSError as error:
        return Finding("bad", "data folder", f"FEDEMU_DATA = {chosen}: {error.strerror}; correct or unset it")
    except ConfigurationError as error:
        return Finding("bad", "data folder", f"FEDEMU_DATA: {error}")
    return Finding("ok", "data folder", f"{folder}: {', '.join(names) or 'empty'}")


def _extras() -> Iterator[Finding]:
    """Whether the packages of each extra are there. Nothing is imported."""
    for extra, use in EXTRAS.items():
        required = list(_required(extra))
        if wrong := list(_unmet(required)):
            detail = f"{', '.join(wrong)}; only needed for {use}: pip install 'fedemu[{extra}]'"
            yield Finding("note", extra, detail)
        else:
            yield Finding("ok", extra, ", ".join(f"{one.name} {metadata.version(one.name)}" for one in required))


def _prometheus() -> Finding:
    found = shutil.which("prometheus")
    if found is None:
        return Finding(
            "note",
            "prometheus",
            "not installed; only needed to collect metrics: apt install prometheus, or prometheus.io/download",
        )
    return Finding("ok", "prometheus", found)
