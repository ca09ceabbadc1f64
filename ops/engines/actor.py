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
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fedemu.ops.data.apart import at_hand
from fedemu.ops.data.cache import read
from fedemu.ops.data.corpora import SENT
from fedemu.ops.engines.sending import SentFile, folder_of, node_folder, receive
from fedemu.ops.experiment import Experiment
from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.running.launch import DEVICES_OUTPUT, child_command
from fedemu.ops.terminal import COMPLAINT, last_words
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.files import write_whole
from fedemu.protocol.host.paths import exists
from fedemu.protocol.host.private import private_folder
from fedemu.protocol.wording import refusal

MOST_RESTARTS: Final = 5
"""How often a supervisor that is killed is started again at its place, and a place that can't begin on a node."""


@dataclass(frozen=True, kw_only=True)
class Handed:
    """What a place is handed by Ray's own channel.

    ``run`` names the run directory. ``runtime`` are the settings as JSON. ``keys`` are the two files of the place's
    pair, by their names. ``leases`` are the records of the leases that it has held elsewhere, by their paths in the
    folder of its state, and ``packed`` is that whole folder, if there was time to pack it. ``experiment`` are its
    bytes, and ``data`` is the digest of its data. ``environment`` holds where the node does not say otherwise.
    """

    place: int
    count: int
    run: str
    runtime: Mapping[str, Any]
    keys: Mapping[str, str]
    experiment: bytes
    data: str
    state: str = ""
    leases: Mapping[str, str] | None = None
    packed: bytes = b""
    environment: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    """How a place stands. ``code`` is the exit code of its supervisor, None while it lives.

    A place that ``lacks_data`` waits for them.
    """

    code: int | None
    leases: Mapping[str, str]
    words: str
    lacks_data: bool = False


class Place:
    """The actor. It is made by ``on_ray.py``, which hands it over to Ray."""

    def __init__(self, handed: Handed) -> None:
        import ray

        resources = ray.get_runtime_context().get_assigned_resources()
        self._state = place_folder(handed)
        self._logs = self._state / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._private = ExitStack()
        keys = KeyFolder(self._private.enter_context(private_folder()))
        for name, text in handed.keys.items():
            (keys.path / name).touch(mode=0o600)
            (keys.path / name).write_text(text, encoding="utf-8")
        _receive(self._state, handed)
        # Ray has said what this place may use; which cores it may run on says nothing here.
        share = int(resources.get("GPU", 0) or resources.get("CPU", 0)) or 1
        runtime = {**handed.runtime, "keys": str(keys.path), "trainers": handed.runtime.get("trainers") or share}
        self._command = (str(handed.count), str(self._state), str(self._logs), json.dumps(runtime))
        for name, value in (handed.environment or {}).items():
            os.environ.setdefault(name, value)
        self._sent = folder_of(handed.data)
        self._lacks_data = not at_hand(Experiment.from_bytes(handed.experiment)) and read(self._sent) is None
        self._words = ""
        self._code: int | None = None
        self._restarts = 0
        self._stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        # The kernel ends the supervisor together with the thread that has started it, so this thread stays.
        self._thread = threading.Thread(target=self._keep, name="supervisor", daemon=True)
        if not self._lacks_data:
            self._thread.start()

    def report(self) -> Report:
        """How the place stands now."""
        words = self._words or (last_words(self._logs / DEVICES_OUTPUT) if self._code else "")
        return Report(code=self._code, leases=_records(self._state), words=words, lacks_data=self._lacks_data)

    def take_data(self, files: Sequence[SentFile]) -> None:
        """Store the data that this place lacks, and start the supervisor. Without them the place has ended."""
        import ray

        try:
            receive(files, ray.get, self._sent)
        except FedemuError as error:
            self._code, self._words = error.exit_code, f"{COMPLAINT}{error}"
            return
        except Exception as error:  # Ray has lost a blob, or who has sent it
            said = next(iter(str(error).splitlines()), "")
            self._code = FedemuError.exit_code
            self._words = f"{COMPLAINT}the data did not come: {type(error).__name__}: {said}"
            return
        self._lacks_data = False
        if not self._stopped:
            self._thread.start()

    def leave(self) -> bytes:
        """Stop the supervisor, and return its packed folder, so that the place can go on elsewhere."""
        self._stopped = True
        if self._process is not None:
            self._process.terminate()
        if self._thread.is_alive():
            self._thread.join()
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            for record in _records(self._state):
                folder = Path(record).parent
                archive.add(self._state / folder, str(folder), filter=_without_blobs)
        return packed.getvalue()

    def _keep(self) -> None:
        with self._private:
            try:
                self._code = self._supervised()
            except OSError as error:  # whoever asks would be told that the supervisor lives
                self._words = f"{COMPLAINT}no supervisor can be started on this node: {refusal(error)}"
                self._code = FedemuError.exit_code

    def _supervised(self) -> int:
        """Start the supervisor, and again if it is killed. Returns its exit code."""
        sent = {SENT: str(self._sent)} if read(self._sent) is not None else {}
        while True:
            command = child_command("fedemu-devices", "fedemu.ops.running.devices", *self._command)
            with (self._logs / DEVICES_OUTPUT).open("ab") as output:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env={**os.environ, **sent},
                    start_new_session=True,
                )
            if self._stopped:  # ``leave`` may have looked for a process before this one was there
                self._process.terminate()
            code = self._process.wait()
            if code >= 0 or self._stopped or self._restarts == MOST_RESTARTS:
                return code if code >= 0 else 128 - code
            self._restarts += 1


def place_folder(handed: Handed) -> Path:
    """The folder of a place's state: on this node, or below one that the user has named and all nodes see."""
    name = hashlib.sha256(handed.run.encode()).hexdigest()[:16]
    return (Path(handed.state) if handed.state else node_folder() / name) / f"place-{handed.place}"


def _receive(state: Path, handed: Handed) -> None:
    """Put in place what an earlier life of the place has had elsewhere, unless it is here."""
    known = handed.leases or {}
    if handed.packed and not all(exists(state / name) for name in known):
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
