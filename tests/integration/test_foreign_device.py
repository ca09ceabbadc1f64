"""The device of ``docs/foreign_device``, a program in JavaScript, trains in whole runs as fedemu's own devices do."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
import zmq.auth
from safetensors.numpy import load_file

from fedemu.coordinator.fleet.roster import Roster, Seated
from fedemu.coordinator.record.run import read_run
from fedemu.coordinator.record.summary import Summary
from fedemu.coordinator.serve import serve
from fedemu.ops.assembly.coordinator import assemble
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.bench.fleet.scripted import ScriptedCoordinator, Terms
from fedemu.ops.experiment.sources import load_experiment, write_frozen
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.errors import RefusedError
from fedemu.protocol.messages import Enroll, Hello, Work
from fedemu.protocol.transport.curve import ServerKeys
from fedemu.protocol.transport.zeromq import ZmqNetwork

SOURCE = Path(__file__).parents[2] / "docs" / "foreign_device"
SETTINGS = (
    "rounds=3", "fleet.devices=2", "fleet.per_round=2", "fleet.over_selection=1", "availability.kind=always",
    "faults.crash_rate=0", "local.batch_size=2000", "local.epochs=5", "local.momentum=0.5", "local.weight_decay=0.001",
    "local.lr_decay=0.9", "limits.max_norm=1e9",
)  # fmt: skip
"""Samples that fit into one batch are not shuffled, so both devices take the same steps."""


@pytest.fixture(scope="session")
def foreign_device() -> Path:
    """The program beside its packages, which are installed once, in the exact versions that it names."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wanted = (SOURCE / "package.json").read_bytes()
    folder = base / "fedemu-tests" / f"foreign-device-{hashlib.sha256(wanted).hexdigest()[:12]}"
    if not (folder / "node_modules" / ".package-lock.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_bytes(wanted)
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            pytest.skip(f"npm cannot install the packages: {done.stderr.strip().splitlines()[-1:]}")
    shutil.copy(SOURCE / "device.mjs", folder)
    return folder / "device.mjs"


def certificate(folder: Path, name: str) -> tuple[str, str]:
    """The public and the secret key of new files ``NAME.key`` and ``NAME.key_secret``."""
    folder.mkdir(exist_ok=True)
    public, secret = zmq.auth.create_certificates(folder, name)
    assert Path(public).exists()
    keys = zmq.auth.load_certificate(secret)
    assert keys[1] is not None
    return keys[0].decode(), keys[1].decode()


def refuse_once(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """Let coordinators forget each device once, and refuse its next hello. Returns these devices, by reason."""
    done: dict[str, set[int]] = {"unknown_peer": set(), "lease_unknown": set()}
    heard, hello = Roster.heard, Roster.hello

    def forgets(roster: Roster, peer: bytes, now: float) -> bool:
        device = roster.device_of(peer)
        if device is None or device in done["unknown_peer"]:
            return heard(roster, peer, now)
        done["unknown_peer"].add(device)
        return False

    def refuses(roster: Roster, peer: bytes, message: Hello, now: float, key: str = "") -> Seated:
        if not message.incarnation or message.device in done["lease_unknown"]:
            return hello(roster, peer, message, now, key)
        done["lease_unknown"].add(message.device)
        raise RefusedError("lease_unknown", "The lease was not granted on this connection.")

    monkeypatch.setattr(Roster, "heard", forgets)
    monkeypatch.setattr(Roster, "hello", refuses)
    return done


@pytest.mark.timeout(300)
def test_a_run_of_foreign_devices_learns_what_a_run_of_own_devices_learns(
    foreign_device: Path,
    in_one_process: Callable[..., Summary],
    tmp_path: Path,
    socket_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each device is forgotten once, and refused once when it comes back, as by an edge that was started again."""
    own = in_one_process(tmp_path / "own", *SETTINGS)
    refusals = refuse_once(monkeypatch)
    public, secret = certificate(tmp_path / "server", "machine")
    approved, _ = certificate(tmp_path / "keys", "machine")

    experiment, _ = load_experiment("digits-small", list(SETTINGS), {})
    directory = tmp_path / "foreign"
    directory.mkdir()
    write_frozen(experiment, directory)
    network = ZmqNetwork(keys=ServerKeys(public, secret, {approved}.__contains__))
    address = f"ipc://{socket_folder}/coordinator"
    command = ["node", str(foreign_device), address]
    command += ["--server-key", str(tmp_path / "server" / "machine.key"), "--keys", str(tmp_path / "keys")]

    async def play() -> tuple[Any, list[int | None]]:
        devices = []
        playing = asyncio.create_task(serve(assemble(directory, experiment, network, address)))
        try:
            for _ in range(2):
                devices.append(await asyncio.create_subprocess_exec(*command))
            ending = [asyncio.create_task(device.wait()) for device in devices]
            # A device that is told to stop ends with 0, a little before the run is over. Another end is a failure.
            await asyncio.wait([playing, *ending], return_when=asyncio.FIRST_COMPLETED)
            assert playing.done() or not any(device.returncode for device in devices)
            summary = await playing
            return summary, [await device.wait() for device in devices]
        finally:
            playing.cancel()
            for device in devices:
                if device.returncode is None:
                    device.kill()
                    await device.wait()

    try:
        summary, codes = asyncio.run(play())
    finally:
        network.close()
    assert codes == [0, 0]
    assert refusals == {"unknown_peer": {0, 1}, "lease_unknown": {0, 1}}
    assert (summary.outcome, summary.perturbed, summary.totals["accepted"]) == ("completed", False, 6)
    assert summary.final_accuracy == pytest.approx(own.final_accuracy, abs=0.003)  # one of 360 test samples
    there, here = (load_file(tmp_path / run / "model.safetensors") for run in ("foreign", "own"))
    assert max(float(np.abs(there[name] - here[name]).max()) for name in here) < 1e-5
    rows = [[row.loss for row in read_run(tmp_path / run).rows] for run in ("foreign", "own")]
    assert rows[0] == pytest.approx(rows[1], abs=1e-4)


class Forgetful(ScriptedCoordinator):
    """A coordinator that starts again, and knows nobody, before each first fetch: of the experiment and of a model."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.back = asyncio.Event()
        self.leases: list[str | None] = []

    def enroll(self, peer: bytes, enroll: Enroll) -> None:
        super().enroll(peer, enroll)
        if not self.leases:
            self.supervisor = None
        self.leases.append(enroll.lease)

    def welcome(self, peer: bytes, hello: Hello) -> None:
        super().welcome(peer, hello)
        if hello.incarnation:
            self.back.set()
        else:
            model = self.blob("model", encode_tree({"w": np.zeros(1, np.float32)}))
            work = Work(
                ask="1.0.0", program="train", task=0, start=0.0, shared=(model,), state=None, download_bytes=1,
                upload_bytes=1, passes=1.0, deadline=1e6, durable_round=0,
            )  # fmt: skip
            self.members.clear()
            self.supervisor = None
            self.router.send(peer, work)


@pytest.mark.timeout(120)
def test_a_foreign_device_that_is_forgotten_while_it_fetches_enrols_and_says_hello_again(
    foreign_device: Path, tmp_path: Path, socket_folder: Path
) -> None:
    experiment, _ = load_experiment("digits-small", list(SETTINGS), {})
    parts = Parts(experiment)
    terms = Terms(range(1), parts.corpus.digest, heartbeat_seconds=1.0, patience=30, clock="wall")

    async def play() -> None:
        content = experiment.to_bytes(), encode_tree(parts.stream.to_arrays())
        coordinator = Forgetful(ZmqNetwork(), tmp_path / "blobs", terms, *content)
        coordinator.open(f"ipc://{socket_folder}/coordinator")
        device = await asyncio.create_subprocess_exec("node", str(foreign_device), coordinator.address)
        try:
            async with asyncio.timeout(60):
                await coordinator.back.wait()
            assert coordinator.leases == [None, terms.lease]
        finally:
            device.kill()
            await device.wait()
            coordinator.close()

    asyncio.run(play())
