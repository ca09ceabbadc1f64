"""The floor of the fleet: children that are forked from a process with the imports of a device, each with one DEALER.

``python -m fedemu.ops.bench.fleet.bare ADDRESS COUNT`` forks when it reads a line, and ends when its input ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import NoReturn

# Imported only for their weight in memory, because a device process has them too.
import msgspec  # noqa: F401
import numpy  # noqa: F401
import pydantic  # noqa: F401
import zmq

from fedemu.protocol.host.garbage import settle
from fedemu.protocol.host.kernel import end_with_parent


def main(address: str, count: int) -> None:
    """Fork ``count`` children that connect to ``address``, and kill them at the end of the input."""
    settle()
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    parent = os.getpid()
    children = []
    for number in range(count):
        child = os.fork()
        if child == 0:
            end_with_parent(parent)
            _live(address, number)
        children.append(child)
    print("forked", flush=True)
    sys.stdin.readline()
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)


def _live(address: str, number: int) -> NoReturn:
    try:
        asyncio.run(_echo(address, number))
    finally:
        os._exit(1)


async def _echo(address: str, number: int) -> None:
    """Send the child's number, then send back every message."""
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
    socket.connect(address)
    socket.send(str(number).encode())

    def drain() -> None:
        while int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            socket.send(socket.recv())

    loop = asyncio.get_running_loop()
    loop.add_reader(int(socket.getsockopt(zmq.FD)), drain)
    drain()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
