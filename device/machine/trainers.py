"""The trainer processes of a machine, as their supervisor sees them.

The nursery forks them, and forks them again when they end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from msgspec.structs import replace

from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT
from fedemu.device.host.processors import gpu_share
from fedemu.device.machine.forkers import ForkingProcess
from fedemu.device.pipe import FROM_NURSERY, Ended, Forked, NotForked, TrainerSetup
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.futures import listen
from fedemu.protocol.messages import Message
from fedemu.protocol.wording import ending

log = logging.getLogger(__name__)

COMMAND = ("-m", "fedemu.device.compute.nursery")
"""The arguments of the Python interpreter that make a nursery of it."""
MOST_FAILURES = 5
"""A trainer that ends this often in a row before it is ready is given up, and the machine with it."""


async def start_nursery(trainer: str, environment: Mapping[str, str] | None = None) -> ForkingProcess:
    """Start a nursery. ``trainer`` names the function that opens a trainer, so that its module is imported.

    ``environment`` are variables that trainers need beside those that all of them have.
    """
    return await ForkingProcess.start((*COMMAND, trainer), COMPUTE_ENVIRONMENT | dict(environment or {}), FROM_NURSERY)


class Trainers:
    """The trainers of one machine, numbered from 0. ``nursery`` forks them.

    Each sees one of these ``gpus``, by CUDA's names, and takes its share of the memory. They take them in turn. As many
    machines as ``beside`` says have the same GPUs, and as many trainers.

    Calls ``ended`` with the number of a trainer whose process has ended, and with what is said of it after its name,
    ``restarted`` when it is started again, and ``failed`` with an error that another start would not mend.
    """

    def __init__(
        self,
        nursery: ForkingProcess,
        setup: TrainerSetup,
        count: int,
        *,
        gpus: Sequence[str] = (),
        beside: int = 1,
        ended: Callable[[int, str], None],
        restarted: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._nursery = nursery
        self._setup = setup
        self._count = count
        self._gpus = gpus
        self._gpu_share = gpu_share(count * beside, len(gpus)) if gpus else 1.0
        self._ended = ended
        self._restarted = restarted
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        self._pids: dict[int, int] = {}
        self._ready: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._faults: dict[int, str] = {}
        """Why trainers that are about to end are killed, by their number, to stand after their name."""
        self._pauses: dict[int, asyncio.TimerHandle] = {}
        """The trainers that are about to be started again."""
        self._keeping: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pids(self) -> Mapping[int, int]:
        """The process ids of the living trainers, by their number."""
        return self._pids

    @property
    def starting(self) -> list[int]:
        """The numbers of the living trainers that are not ready yet."""
        return [number for number in self._pids if number not in self._ready]

    def launch(self) -> None:
        """Start all trainers. Each says on the bus when it is ready."""
        self._keeping = self._loop.create_task(self._keep())
        listen(self._keeping, self._failed)

    def ready(self, number: int) -> None:
        """Trainer ``number`` can take jobs."""
        self._ready.add(number)

    def faulty(self, number: int, why: str) -> None:
        """Trainer ``number`` cannot go on, and says why. Another takes its place."""
        first_line = why.partition("\n")[0].removesuffix(".")
        self._faults[number] = f"could not go on: {first_line}"
        self._kill(number)

    def hung(self, number: int, lacked: str) -> None:
        """Kill trainer ``number``, which ``lacked`` something for too long. Another takes its place."""
        self._faults[number] = f"was killed because it {lacked}"
        self._kill(number)

    def _kill(self, number: int) -> None:
        if number in self._pids:
            with suppress(ProcessLookupError):
                os.kill(self._pids[number], signal.SIGKILL)

    async def stop(self) -> None:
        """End all trainers and the nursery."""
        self._stopping = True
        for number in list(self._pids):
            self._kill(number)
        if self._keeping is not None:  # first, because it may be starting another nursery
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._nursery.stop()

    async def _keep(self) -> None:
        """Keep the nursery alive. The kernel kills its trainers with it. Raises FedemuError if that cannot be done."""
        failures = 0
        while True:
            code = await self._nursery.follow(self._heard, self._fork_all)
            fruitful = bool(self._ready)
            for pause in self._pauses.values():
                pause.cancel()  # the next nursery starts all of them
            self._pauses.clear()
            self._faults.clear()
            for number in list(self._pids):
                del self._pids[number]
                self._ready.discard(number)
                self._ended(number, f"ended with its nursery, which {ending(code)}")
            if self._stopping:
                return
            failures = 0 if fruitful else failures + 1
            if failures >= MOST_FAILURES:
                raise FedemuError(f"No trainer can be started: the nursery {ending(code)}.")
            log.warning("the nursery of trainers %s; starting it again", ending(code))
            self._restarted()
            if failures > 1:
                await asyncio.sleep(0.1 * 2**failures)
            self._nursery = await self._nursery.again()

    def _fork_all(self) -> None:
        for number in range(self._count):
            self._fork(number)

    def _fork(self, number: int) -> None:
        if not self._stopping:
            gpu = self._gpus[number % len(self._gpus)] if self._gpus else None
            self._nursery.tell(replace(self._setup, number=number, gpu=gpu, gpu_share=self._gpu_share))

    def _heard(self, message: Message) -> None:
        match message:
            case Forked(number=number, pid=pid):
                self._pids[number] = pid
            case NotForked(number=number, detail=detail):
                self._trainer_ended(number, f"could not be started: {detail}")
            case Ended(number=number, code=code):
                self._trainer_ended(number, self._faults.pop(number, "") or ending(code))

    def _trainer_ended(self, number: int, why: str) -> None:
        self._pids.pop(number, None)
        self._failures[number] = 0 if number in self._ready else self._failures[number] + 1
        self._ready.discard(number)
        self._ended(number, why)
        if self._stopping:
            return
        failures = self._failures[number]
        if failures >= MOST_FAILURES:
            self._failed(FedemuError(f"Trainer {number} failed {failures} times in a row; at last it {why}."))
            return
        log.warning("trainer %d is started again: it %s", number, why)
        self._restarted()
        pause = 0.1 * 2**failures if failures > 1 else 0.0
        self._pauses[number] = self._loop.call_later(pause, self._fork, number)
