"""A device process with many devices, in a thread: its bus and its coordinator are in the thread of the test."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fedemu.device.bus import TO_SUPERVISOR, Attach, Quit, Rouse
from fedemu.device.pipe import Setup
from fedemu.device.process import process
from fedemu.device.process.birth import Birthplace
from fedemu.protocol.codec import UP, Envelope
from fedemu.protocol.messages import Bye, Hello, Proceed, Scheduled, Stop, Welcome, Work
from fedemu.protocol.sharing.hub import Hub
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.interface import BOUNDLESS, let_all_pass

DEVICES = 4000


class Machine:
    """What a process with ``DEVICES`` devices talks to. All of them may proceed at the same moment."""

    def __init__(self, folder: Path, work: Work) -> None:
        loop = asyncio.get_running_loop()
        self.network = DirectNetwork(loop)
        self.work = work
        self.heard: Counter[str] = Counter()
        self.process = b""
        self.scheduled: list[bytes] = []
        self.begun: list[tuple[int, int]] = []
        self.gone: list[bytes] = []
        self.peers: dict[int, bytes] = {}
        self.bus = self.network.bind(f"ipc://{folder}/b", TO_SUPERVISOR, self._on_bus, lambda peer, error: None)
        self.hub = Hub(
            self.network,
            f"ipc://{folder}/c",
            UP,
            self._from_device,
            lambda peer, error: None,
            let_all_pass,
            BOUNDLESS,
            loop,
            DEVICES,
            over=lambda peer: None,
        )

    def _on_bus(self, peer: bytes, envelope: Envelope) -> None:
        self.heard[envelope.message.type] += 1
        if isinstance(envelope.message, Attach):
            self.process = peer

    def _from_device(self, peer: bytes, envelope: Envelope) -> None:
        match envelope.message:
            case Hello(device=device, incarnation=incarnation):
                self.begun.append((device, incarnation))
                self.peers[device] = peer
                self.hub.send(peer, replace(WELCOME, device=device))
                self.hub.send(peer, self.work)
            case Scheduled():
                self.scheduled.append(peer)
            case Bye():
                self.gone.append(peer)


def setup_for(machine: Machine) -> Setup:
    return Setup(
        coordinator=machine.hub.address,
        shared=True,
        bus=machine.bus.address,
        token="",
        lease="lease",
        heartbeat_seconds=60.0,
        patience=5,
        behaviours="",
        experiment="",
        partition="",
        devices="",
        logs=None,
    )


WELCOME = Welcome(device=0, clock="virtual", horizon=1.0, heartbeat_seconds=60.0, patience=5, durable_round=0)


async def test_no_job_is_lost_if_thousands_of_devices_of_a_process_begin_at_once(
    toy_birthplace: Callable[[int], Birthplace], toy_work: Work, socket_folder: Path, until: Callable[..., Any]
) -> None:
    machine = Machine(socket_folder, toy_work)
    setup = setup_for(machine)
    lives = [(device, 0) for device in range(DEVICES)]
    running = asyncio.create_task(asyncio.to_thread(process.run, setup, toy_birthplace(DEVICES), 0, lives))
    try:
        await until(lambda: len(machine.scheduled) == DEVICES, "the schedules of all")
        for peer in machine.scheduled:
            machine.hub.send(peer, Proceed(ask="1.0.0"))
        await asyncio.sleep(0.01)
        time.sleep(1.0)  # noqa: ASYNC251 - meanwhile the supervisor is busy
        await until(lambda: machine.heard["submit"] == DEVICES, "the jobs of all")
    finally:
        machine.bus.send(machine.process, Quit())
        assert await running == process.RETIRED
        machine.network.close()


async def test_a_process_begins_the_lives_of_those_that_have_retired_while_others_live(
    toy_birthplace: Callable[[int], Birthplace], toy_work: Work, socket_folder: Path, until: Callable[..., Any]
) -> None:
    machine = Machine(socket_folder, toy_work)
    lives = [(device, 0) for device in range(3)]
    running = asyncio.create_task(asyncio.to_thread(process.run, setup_for(machine), toy_birthplace(3), 0, lives))
    try:
        await until(lambda: len(machine.begun) == 3, "three lives")
        machine.hub.send(machine.peers[1], Stop(reason="interrupted"))
        await until(lambda: machine.gone, "its goodbye")
        machine.bus.send(machine.process, Rouse(lives=tuple((device, 1024) for device in range(3))))
        await until(lambda: len(machine.begun) == 4, "one more life")
        assert machine.begun[3] == (1, 1024)
    finally:
        machine.bus.send(machine.process, Quit())
        assert await running == process.RETIRED
        machine.network.close()


async def test_a_device_whose_hello_is_lost_with_its_connection_says_it_again_on_the_next_one(
    toy_birthplace: Callable[[int], Birthplace], toy_work: Work, socket_folder: Path, until: Callable[..., Any]
) -> None:
    machine = Machine(socket_folder, toy_work)
    address, loop = f"{machine.hub.address}-own", asyncio.get_running_loop()
    told: list[int] = []

    def coordinator() -> DirectNetwork:
        def received(peer: bytes, envelope: Envelope) -> None:
            told.append(envelope.message.incarnation if isinstance(envelope.message, Hello) else -1)

        network = DirectNetwork(loop)
        network.bind(address, UP, received, lambda peer, error: None)
        return network

    first = coordinator()
    setup = replace(setup_for(machine), coordinator=address)
    running = asyncio.create_task(asyncio.to_thread(process.run, setup, toy_birthplace(1), 0, [(0, 0)]))
    try:
        await until(lambda: told == [0], "the first Hello")
        first.close()
        second = coordinator()
        await until(lambda: told == [0, 1], "the Hello of the next connection")
        second.close()
    finally:
        machine.bus.send(machine.process, Quit())
        assert await running == process.RETIRED
        machine.network.close()


def test_a_warning_that_cannot_be_logged_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    record = logging.LogRecord("fedemu.device", logging.WARNING, __file__, 1, "a message is lost", None, None)
    handler = process._Late()
    lost = tmp_path / "removed" / "device-0.log"
    for path, reason in ((lost, "No such file or directory"), (Path("/dev/full"), "the disk is full; make room there")):
        handler.begin(path)
        handler.handle(record)
        assert capfd.readouterr().err == f"a message is lost (the log {path} cannot be written: {reason})\n"
    handler.begin(lost)
    lost.parent.mkdir()
    handler.handle(record)
    assert lost.read_text() == "a message is lost\n"
