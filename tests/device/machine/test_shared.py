"""The relay through which the device processes of a machine share its connection."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from fedemu.device.machine import shared
from fedemu.device.machine.shared import share_link
from fedemu.protocol.codec import DOWN, UP, encode
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.open_files import open_files
from fedemu.protocol.messages import SILENT, Bye, Hello, Message, TensorSpec, Work
from fedemu.protocol.sharing.trunk import Trunk
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.memory import MemoryNetwork
from fedemu.protocol.transport.zmtp import GREETING, Incoming, framed, ready

MESSAGES = 300
PART = bytes(100_000)
SPEC = TensorSpec(name="x", dtype="uint8", shape=(len(PART),))


def a_link(folder: Path) -> tuple[str, socket.socket]:
    """An address, and the socket of a process that is about to connect there."""
    sock = socket.socket(socket.AF_UNIX)
    sock.setblocking(False)
    return str(folder / "s"), sock


@pytest.mark.parametrize(("most", "heartbeat"), [(0.02, 60.0), (60.0, 0.02)])
async def test_a_shared_connection_beats_until_it_was_removed_which_ends_the_machine_with_a_sentence(
    most: float, heartbeat: float, socket_folder: Path, monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any]
) -> None:
    monkeypatch.setattr(shared, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(shared, "BEAT_SECONDS", most)
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[Exception] = loop.create_future()
    beats = list[Trunk]()
    monkeypatch.setattr(Trunk, "beat", lambda trunk: beats.append(trunk))
    granted = SimpleNamespace(heartbeat_seconds=heartbeat, patience=5)
    network, trunk = DirectNetwork(loop), Trunk(MemoryNetwork(), loop)
    here: Any = SimpleNamespace(trunk=trunk, granted=granted, fail=failed.set_result)
    path, sock = a_link(socket_folder)
    async with AsyncExitStack() as stack:
        stack.callback(sock.close)
        stack.callback(network.close)
        share_link(here, network, f"ipc://{path}", 1, stack)
        await until(lambda: len(beats) >= 2, "two beats", 30.0)
        os.unlink(path)
        assert "was removed, so no process can connect there any more" in str(await asyncio.wait_for(failed, 30))


async def test_a_device_that_falls_silent_is_gone_as_soon_as_was_granted_and_the_end_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, until: Callable[..., Any]
) -> None:
    monkeypatch.setattr(shared, "LOOK_SECONDS", 0.01)
    loop, sent = asyncio.get_running_loop(), list[Message]()
    network, trunk = MemoryNetwork(), Trunk(MemoryNetwork(), loop)
    trunk.open = True
    monkeypatch.setattr(trunk, "send", lambda channel, frames: sent.append(UP.decode(frames).message))
    granted = SimpleNamespace(heartbeat_seconds=0.02, patience=2)
    here: Any = SimpleNamespace(trunk=trunk, granted=granted, fail=pytest.fail)
    async with AsyncExitStack() as stack:
        share_link(here, network, "link", 1, stack)
        device = network.connect("link", DOWN, lambda envelope: None, pytest.fail)
        hello = Hello(device=0, incarnation=0, lease="lease")
        device.send(hello)
        await until(lambda: len(sent) == 2, "the end of the device", 5.0)
        assert sent == [hello, Bye(reason=SILENT)]
        device.close()
    await asyncio.sleep(0)
    assert network.routers == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_machine_may_have_a_connection_for_each_of_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    granted = SimpleNamespace(heartbeat_seconds=60.0, patience=5)
    here: Any = SimpleNamespace(trunk=Trunk(MemoryNetwork(), loop), granted=granted, fail=pytest.fail)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, before[1]))
    try:
        async with AsyncExitStack() as stack:
            share_link(here, MemoryNetwork(), "link", 100, stack)
            assert open_files() == 4 * 100 + 512
            monkeypatch.setattr(shared, "most_open_files", lambda: 911)
            with pytest.raises(ConfigurationError) as error:
                share_link(here, MemoryNetwork(), "link", 100, stack)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert str(error.value) == (
        "a shared connection needs 912 open files for the device processes of this machine, but at most 911 are "
        "allowed; raise the limit (ulimit -Hn 912), or pack devices with --per-process"
    )


async def test_a_process_that_reads_late_gets_all_that_came_for_its_devices(
    socket_folder: Path, toy_work: Work
) -> None:
    loop = asyncio.get_running_loop()
    network, trunk = DirectNetwork(loop), Trunk(MemoryNetwork(), loop)
    granted = SimpleNamespace(heartbeat_seconds=60.0, patience=5)
    here: Any = SimpleNamespace(trunk=trunk, granted=granted, fail=pytest.fail)
    trunk.open = True
    path, sock = a_link(socket_folder)
    async with AsyncExitStack() as stack:
        stack.callback(network.close)
        share_link(here, network, f"ipc://{path}", 1, stack)
        stack.callback(sock.close)
        await loop.sock_connect(sock, path)
        hello = framed(encode(Hello(device=0, incarnation=0, lease="lease")))
        await loop.sock_sendall(sock, GREETING + ready(b"DEALER") + b"".join(hello))
        await asyncio.sleep(0.2)
        for _ in range(MESSAGES):
            trunk.received(0, encode(replace(toy_work, tensors=(SPEC,)), [PART]))
        incoming, got = Incoming(10, 10**6), 0
        while got < MESSAGES:
            data = await asyncio.wait_for(loop.sock_recv(sock, 50_000), 5.0)
            if incoming.large is None:
                got += len([*incoming.feed(data)])
                continue
            rest = len(incoming.large)
            incoming.large[: len(data)] = data[:rest]
            got += incoming.filled(min(len(data), rest)) is not None
            got += len([*incoming.feed(data[rest:])])
