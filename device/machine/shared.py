"""One connection for all devices of a machine: they connect to a relay of their supervisor, which shares its own."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace

from fedemu.device.bus import LIMITS
from fedemu.device.machine.arrival import Arrival
from fedemu.protocol.codec import Limits
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.futures import listen
from fedemu.protocol.host.open_files import allow_open_files, most_open_files
from fedemu.protocol.sharing.relay import Relay
from fedemu.protocol.transport.interface import BOUNDLESS, Network

LOOK_SECONDS = 0.5
BEAT_SECONDS = 2.0
"""The longest time after which a shared connection shows that it lives. There are few of them in any fleet."""
SPARE_FILES = 512
"""Open files that a supervisor needs beside its connections to device processes."""
LARGEST = Limits(frame_bytes=LIMITS.frame_bytes, message_bytes=LIMITS.message_bytes)
"""As on the bus: only this machine's own devices are heard, and the coordinator checks what they say."""


def share_link(here: Arrival, network: Network, address: str, processes: int, stack: AsyncExitStack) -> None:
    """Listen at ``address`` for the device processes of this machine, until ``stack`` ends it.

    Raises ConfigurationError if this process may not have a connection for each of them.
    """
    _allow_files(4 * processes + SPARE_FILES)
    loop = asyncio.get_running_loop()
    # A process with many devices gets as many messages at once, and none may be lost.
    bounds = replace(BOUNDLESS, queue=0, most_unfinished=lambda: LIMITS.message_bytes)
    relay = Relay(network, address, here.trunk, loop, LARGEST, loop.time, bounds=bounds, own=True)
    relay.watch(here.granted.heartbeat_seconds, here.granted.patience)
    looking = loop.create_task(_look(relay, here))
    listen(looking, here.fail)
    stack.callback(relay.close)
    stack.callback(looking.cancel)


async def _look(relay: Relay, here: Arrival) -> None:
    loop = asyncio.get_running_loop()
    beat = loop.time()
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        relay.look()
        if loop.time() >= beat:
            beat = loop.time() + min(BEAT_SECONDS, here.granted.heartbeat_seconds)
            here.trunk.beat()


def _allow_files(wanted: int) -> None:
    if (most := most_open_files()) < wanted:
        raise ConfigurationError(
            f"a shared connection needs {wanted} open files for the device processes of this machine, but at most "
            f"{most} are allowed; raise the limit (ulimit -Hn {wanted}), or pack devices with --per-process"
        )
    allow_open_files(wanted)
