"""The trainer processes of a machine, as their supervisor sees them: started, watched, and started again."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT
from fedemu.device.machine.processors import one_gpu
from fedemu.device.pipe import TrainerSetup, pack_message
from fedemu.protocol.errors import FedemuError

log = logging.getLogger(__name__)

COMMAND = ("-m", "fedemu.device.compute.process")
"""The arguments of the Python interpreter that make a trainer of it."""
MOST_FAILURES = 5
"""A trainer that ends this often in a row before it is ready is given up, and the machine with it."""


class Trainers:
    """The trainers of one machine, numbered from 0.

    Calls ``ended`` with the number of a trainer whose process has ended, ``restarted`` when it is started again, and
    ``failed`` with an error that another start would not mend.
    """

    def __init__(
        self,
        setup: TrainerSetup,
        count: int,
        *,
        ended: Callable[[int], None],
        restarted: Callable[[], None],
        failed: Callable[[FedemuError], None],
    ) -> None:
        self._setup = setup
        self._count = count
        self._ended = ended
        self._restarted = restarted
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._ready: set[int] = set()
        self._stopping = False

    @property
    def pids(self) -> Mapping[int, int]:
        """The process ids of the living trainers, by their number."""
        return {number: p.pid for number, p in self._processes.items() if p.returncode is None}

    def launch(self) -> None:
        """Start all trainers. Each says on the bus when it is ready."""
        self._watchers = [self._loop.create_task(self._keep(number)) for number in range(self._count)]

    def ready(self, number: int) -> None:
        """Trainer ``number`` can take jobs."""
        self._ready.add(number)

    def kill(self, number: int) -> None:
        """Kill a trainer. Another takes its place, and does its jobs again."""
        process = self._processes[number]
        if process.returncode is None:
            process.kill()

    async def stop(self) -> None:
        """Kill all trainers. What they are computing is lost, and they leave nothing behind."""
        self._stopping = True
        for process in self._processes.values():
            if process.returncode is None:
                process.kill()
        if self._watchers:
            await asyncio.wait(self._watchers, timeout=5.0)
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    async def _keep(self, number: int) -> None:
        failures = 0
        while not self._stopping:
            self._ready.discard(number)
            process = await self._spawn(number)
            code = await process.wait()
            self._ended(number)
            if self._stopping:
                return
            failures = 0 if number in self._ready else failures + 1
            if failures >= MOST_FAILURES:
                self._failed(
                    FedemuError(f"Trainer {number} ended {failures} times in a row, at last with code {code}.")
                )
                return
            log.warning("trainer %d ended with code %d; starting it again", number, code)
            self._restarted()
            if failures > 1:
                await asyncio.sleep(0.1 * 2**failures)

    async def _spawn(self, number: int) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *COMMAND,
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | COMPUTE_ENVIRONMENT | one_gpu(number),
            process_group=0,
        )
        self._processes[number] = process
        assert process.stdin is not None
        process.stdin.write(pack_message(self._setup.model_copy(update={"number": number})))
        return process
