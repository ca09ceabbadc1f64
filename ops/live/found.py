"""The supervisors of a run on this machine, found by what the kernel tells of processes and their connections."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from fedemu.ops.watching.feed import LIVE
from fedemu.protocol.host.paths import is_file


class Supervisor(NamedTuple):
    """A supervisor of a run. ``folder`` is where it tells the page what it does."""

    process: psutil.Process
    folder: Path


def supervisors_of(coordinator: int, directory: Path) -> list[Supervisor]:
    """The supervisors that work for the process ``coordinator``, of this user.

    That of ``fedemu run`` has the same parent as the coordinator; with edges there are several, whose parent is a child
    of that one. Those of ``fedemu device`` have a connection to it.
    """
    try:
        serving = psutil.Process(coordinator)
        parents, heard = {serving.ppid(), *_trees(serving.ppid())}, _far_ends(serving)
    except psutil.Error:
        return []
    found = []
    for process in _own_processes():
        with suppress(psutil.Error, OSError):
            if process.pid == coordinator:
                continue
            if process.ppid() in parents and process.name() == "fedemu-devices":
                found.append(Supervisor(process, directory / "devices" / LIVE))
            elif heard and _is_device_command(process) and heard & _near_ends(process):
                found += [Supervisor(process, folder / LIVE) for folder in _state_folders(process)]
    return found


def _trees(command: int) -> Iterator[int]:
    """The processes that have started the edges and machines of a ``fedemu run``."""
    for child in psutil.Process(command).children():
        with suppress(psutil.Error):
            if child.name() == "fedemu-tree":
                yield child.pid


def _own_processes() -> Iterator[psutil.Process]:
    """The processes of this user that may be supervisors. Devices, of which there may be thousands, are left out."""
    for entry in Path("/proc").iterdir():
        with suppress(psutil.Error, OSError):
            if entry.name.isdecimal() and entry.stat().st_uid == os.getuid():
                name = (entry / "comm").read_bytes().strip()  # it need not be text
                if not name.startswith(b"fedemu-") or name == b"fedemu-devices":
                    yield psutil.Process(int(entry.name))


def _is_device_command(process: psutil.Process) -> bool:
    words = process.cmdline()
    return "device" in words and any("fedemu" in word for word in words[:4])


def _far_ends(process: psutil.Process) -> set[tuple[str, int]]:
    return {(end.raddr.ip, end.raddr.port) for end in process.net_connections("tcp") if end.raddr}


def _near_ends(process: psutil.Process) -> set[tuple[str, int]]:
    return {(end.laddr.ip, end.laddr.port) for end in process.net_connections("tcp") if end.raddr}


def _state_folders(process: psutil.Process) -> Iterator[Path]:
    """The state folders in which a supervisor holds a lease: it keeps the folder of its lease open."""
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        with suppress(OSError):
            folder = descriptor.readlink()
            if is_file(folder / "lease.json"):
                yield folder.parent.parent
