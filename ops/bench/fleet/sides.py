"""The fleets that are measured: one of ours with a ``FleetHost``, and a bare one with a plain ROUTER."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import psutil
import zmq

from fedemu.ops.bench.fleet.host import FleetHost
from fedemu.ops.bench.measuring import processes
from fedemu.ops.bench.measuring.worker import BenchmarkError
from fedemu.ops.running.launch import free_address
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.wording import ending

ATTACH_SECONDS = 120.0
SWEEP_SECONDS = 30.0
_LOOK_SECONDS = 0.2
"""How often it is looked whether the machine has ended while its devices are awaited."""
_QUIET_SECONDS = 0.5
_QUIET_SHARE = 0.1


class OurFleet:
    """``fedemu device`` as a child of this process.

    ``attach_seconds`` is the time from the first fork to the last welcome. ``pids`` are the device processes.
    """

    def __init__(self, folder: Path, devices: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._devices = devices
        self._runner = asyncio.Runner()
        self._host: FleetHost | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self.attach_seconds = 0.0
        self.pids: list[int] = []

    def __enter__(self) -> OurFleet:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._supervisor is not None:
            processes.end(self._supervisor)
        if self._host is not None:
            self._runner.run(self._close(self._host))
        self._runner.close()

    def attach(self) -> OurFleet:
        """Start the fleet and wait for all its devices. Raises BenchmarkError if it ends, or takes too long."""
        address = free_address()
        host = self._host = self._runner.run(self._open(address))
        log = self._folder / "terminal.log"
        with log.open("wb") as terminal:
            state = str(self._folder / "state")
            arguments = ["--n", str(self._devices), "--connect", address, "--state", state]
            self._supervisor = subprocess.Popen(
                [*interpreter(), "-m", "fedemu.ops.cli", "device", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=terminal,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            ended = self._runner.run(_attached(host, self._supervisor))
        except TimeoutError:
            raise BenchmarkError(
                f"{self._devices} devices did not attach within {ATTACH_SECONDS:.0f} s: {log.read_text()[-500:]}"
            ) from None
        if ended is not None:
            raise BenchmarkError(f"fedemu device {ending(ended)} before all attached: {log.read_text()[-500:]}")
        end = processes.now()
        self.pids = processes.descendants(self._supervisor.pid, "fedemu-device")
        self.attach_seconds = end - min(map(processes.began, self.pids))
        return self

    def rest(self, seconds: float = 30.0) -> None:
        """Wait until the trainers have imported what they need and use no more CPU time, but at most ``seconds``."""
        assert self._supervisor is not None
        trainers = [psutil.Process(pid) for pid in processes.descendants(self._supervisor.pid, "fedemu-trainer")]
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before = sum(map(processes.cpu_seconds, trainers))
            self._runner.run(asyncio.sleep(_QUIET_SECONDS))
            if sum(map(processes.cpu_seconds, trainers)) - before < _QUIET_SHARE * _QUIET_SECONDS:
                return

    def sweep(self) -> None:
        """Send one message to every device, and wait for all answers."""
        assert self._host is not None
        self._runner.run(self._host.sweep(SWEEP_SECONDS))

    async def _open(self, address: str) -> FleetHost:
        return FleetHost(self._folder, address, self._devices)

    async def _close(self, host: FleetHost) -> None:
        host.close()


async def _attached(host: FleetHost, machine: subprocess.Popen[bytes]) -> int | None:
    """Wait until all devices have attached. Returns the code with which the machine ended before, if it did.

    Raises TimeoutError if they take too long.
    """
    attached = asyncio.ensure_future(host.everyone(ATTACH_SECONDS))
    try:
        while not attached.done():
            if (code := machine.poll()) is not None:
                return code
            await asyncio.wait({attached}, timeout=_LOOK_SECONDS)
    finally:
        attached.cancel()
    await attached
    return None


class BareFleet:
    """The same number of bare children.

    ``attach_seconds`` is the time from the command to fork to the last hello. ``pids`` are the children.
    """

    def __init__(self, devices: int) -> None:
        self._devices = devices
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, devices + 64)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.BACKLOG, 4096)
        self._router.setsockopt(zmq.RCVTIMEO, int(SWEEP_SECONDS * 1000))
        self._router.setsockopt(zmq.LINGER, 0)
        self._peers: list[bytes] = []
        self._parent: subprocess.Popen[bytes] | None = None
        self.attach_seconds = 0.0
        self.pids: list[int] = []

    def __enter__(self) -> BareFleet:
        return self

    def __exit__(self, *raised: object) -> None:
        if self._parent is not None:
            assert self._parent.stdin is not None
            self._parent.stdin.close()
            self._parent.wait(30.0)
        self._router.close()
        self._context.term()

    def attach(self) -> BareFleet:
        """Fork the children and wait for all of them."""
        address = free_address()
        self._router.bind(address)
        self._parent = subprocess.Popen(
            [*interpreter(), "-m", "fedemu.ops.bench.fleet.bare", address, str(self._devices)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            process_group=0,
        )
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdout.readline()
        began = processes.now()
        self._parent.stdin.write(b"fork\n")
        self._parent.stdin.flush()
        self._peers = [self._router.recv_multipart()[0] for _ in range(self._devices)]
        self.attach_seconds = processes.now() - began
        self.pids = [child.pid for child in psutil.Process(self._parent.pid).children()]
        return self

    def sweep(self) -> None:
        """Send one message to every child, and wait for all answers."""
        for peer in self._peers:
            self._router.send_multipart([peer, b"x" * 32])
        for _ in self._peers:
            self._router.recv_multipart()
