"""A relay between devices and their coordinator, which can cut their connections or go silent."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Relay:
    """Passes on what comes to ``address`` to another address, from a thread of its own, until ``close``."""

    def __init__(self, address: str, target: str) -> None:
        self.address = address
        self._target = _place(target)
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._open = True
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._server = self._do(lambda: asyncio.start_server(self._accepted, *_place(address)))

    def cut(self, chance: random.Random, *, all: bool) -> tuple[int, int]:
        """Cut all connections, or some. Returns how many were cut, and how many there were."""

        async def work() -> tuple[int, int]:
            there = list(self._connections.values())
            struck = there if all or not there else chance.sample(there, chance.randint(1, len(there)))
            for ends in struck:
                for writer in ends:
                    writer.transport.abort()
            return len(struck), len(there)

        return self._do(work)

    def silence(self) -> None:
        """Hold back everything, without closing a connection, until ``resume``."""
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def shut(self) -> None:
        """Close new connections as soon as they come, until ``resume``."""
        self._open = False

    def resume(self) -> None:
        """Pass on what was held back, and take connections again."""
        self._open = True
        self._loop.call_soon_threadsafe(self._flowing.set)

    def close(self) -> None:
        """Cut everything, and end the thread."""

        async def work() -> None:
            self._server.close()
            for task in list(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

        self._do(work)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(), self._loop).result(60)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ends = self._connections[task] = [writer]
        try:
            await self._flowing.wait()
            if not self._open:
                return
            far_reader, far_writer = await asyncio.open_connection(*self._target)
            ends.append(far_writer)
            pumps = [
                asyncio.create_task(self._pump(reader, far_writer)),
                asyncio.create_task(self._pump(far_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except OSError:
            pass  # nobody listens at the target
        finally:
            del self._connections[task]
            for end in ends:
                end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(2**16):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)
