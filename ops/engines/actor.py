"""One place on a node of Ray: an actor that starts the supervisor of the place as a process, and starts it again.

The actor decides nothing else. What the devices are and what they have done is between supervisor and coordinator.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.running.launch import child_command, last_words
from fedemu.protocol.host.files import write_whole

MOST_RESTARTS: Final = 5


@dataclass(frozen=True, kw_only=True)
class Handed:
    """What a place is handed by Ray's own channel.

    ``run`` names the run directory. ``runtime`` are the settings as JSON. ``keys`` are the two files of the place's
    pair, by their names. ``leases`` are the records of the leases that it has held elsewhere, by their paths in the
    folder of its state, and ``packed`` is that whole folder, if there was time to pack it.
    """

    place: int
    count: int
    run: str
    runtime: Mapping[str, Any]
    keys: Mapping[str, str]
    state: str = ""
    leases: Mapping[str, str] | None = None
    packed: bytes = b""
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a place stands. ``code`` is the exit code of its supervisor, None while it lives."""

    node: str
    pid: int
    code: int | None
    leases: Mapping[str, str]
    restarts: int
    words: str


class Place:
    """The actor. It is made by ``on_ray.py``, which hands it over to Ray."""

    def __init__(self, handed: Handed) -> None:
        import ray

        self._node: str = ray.get_runtime_context().get_node_id()
        resources = ray.get_runtime_context().get_assigned_resources()
        self._state = place_folder(handed)
        self._logs = self._state / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._private = tempfile.TemporaryDirectory(prefix="fedemu-keys-")  # its mode is 0700
        keys = KeyFolder(Path(self._private.name))
        for name, text in handed.keys.items():
            (keys.path / name).touch(mode=0o600)
            (keys.path / name).write_text(text, encoding="utf-8")
        _receive(self._state, handed)
        # Ray has said what this place may use; which cores it may run on says nothing here.
        share = int(resources.get("GPU", 0) or resources.get("CPU", 0)) or 1
        runtime = {**handed.runtime, "keys": str(keys.path), "trainers": handed.runtime.get("trainers") or share}
        self._command = (str(handed.count), str(self._state), str(self._logs), json.dumps(runtime))
        self._environment = {**os.environ, **(handed.environment or {})}
        self._code: int | None = None
        self._restarts = 0
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends the supervisor together with the thread that has started it, so this thread stays.
        self._thread = threading.Thread(target=self._keep, name="supervisor", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """How the place stands now."""
        pid = self._process.pid if self._process is not None else 0
        words = last_words(self._logs / "devices.out") if self._code else ""
        return Report(
            node=self._node,
            pid=pid,
            code=self._code,
            leases=_records(self._state),
            restarts=self._restarts,
            words=words,
        )

    def leave(self) -> bytes:
        """Stop the supervisor, and return its packed folder, so that the place can go on elsewhere."""
        self._stopped = True
        if self._process is not None:
            self._process.terminate()
        self._thread.join()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for record in _records(self._state):
                folder = Path(record).parent
                archive.add(self._state / folder, str(folder), filter=_without_blobs)
        return packed.getvalue()

    def _keep(self) -> None:
        while True:
            command = child_command("fedemu-devices", "fedemu.ops.running.devices", *self._command)
            with (self._logs / "devices.out").open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._environment,
                    start_new_session=True,
                )
            code = self._process.wait()
            if code >= 0 or self._stopped or self._restarts == MOST_RESTARTS:
                self._code = code if code >= 0 else 128 - code
                return
            self._restarts += 1


def place_folder(handed: Handed) -> Path:
    """The folder of a place's state: on this node, or below one that the user has named and all nodes see."""
    name = hashlib.sha256(handed.run.encode()).hexdigest()[:16]
    local = Path(tempfile.gettempdir()) / f"fedemu-{os.getuid()}" / name
    return (Path(handed.state) if handed.state else local) / f"place-{handed.place}"


def _receive(state: Path, handed: Handed) -> None:
    """Put in place what an earlier life of the place has had elsewhere, unless it is here."""
    known = handed.leases or {}
    if handed.packed and not all((state / name).exists() for name in known):
        with tarfile.open(fileobj=io.BytesIO(handed.packed)) as archive:
            archive.extractall(state, filter="data")
    for name, text in known.items():
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        write_whole(state / name, text)


def _records(state: Path) -> dict[str, str]:
    return {str(path.relative_to(state)): path.read_text(encoding="utf-8") for path in state.glob("*/*/lease.json")}


def _without_blobs(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Blobs can be fetched again."""
    return None if Path(entry.name).name == "blobs" else entry
