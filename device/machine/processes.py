"""The device processes of a machine, as their supervisor sees them.

The zygote starts them, and starts them again when they end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedemu.device.machine.forkers import ForkingProcess
from fedemu.device.machine.observer import MachineObserver
from fedemu.device.pipe import FROM_ZYGOTE, Broken, Ended, Fork, Forked, NotForked, Setup, ZygoteReady
from fedemu.device.process.process import RETIRED
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.futures import fail, listen
from fedemu.protocol.host.phases import mark, used, used_by_ended
from fedemu.protocol.messages import Message
from fedemu.protocol.wording import ending

log = logging.getLogger(__name__)

BIRTH_STRIDE = 16
"""The next life begins this many incarnations above the last known one, since the life before may have used some."""
MOST_FAILURES = 8
"""A process that ends this often in a row without joining is given up, and the machine with it. So is the zygote."""
SHORT_SECONDS = 30.0
"""A zygote that has lived for so long has done its duty, even if none of its devices was asked for anything."""
COMMAND = ("-m", "fedemu.device.process.zygote")
"""The arguments of the Python interpreter that make a zygote of it."""
ZYGOTE_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
"""No threads of a numerical library and one heap only, so that the children stay small."""


async def start_zygote(environment: Mapping[str, str] | None = None) -> ForkingProcess:
    """Start a zygote. ``environment`` are variables that devices need beside those that all of them have."""
    return await ForkingProcess.start(COMMAND, ZYGOTE_ENVIRONMENT | dict(environment or {}), FROM_ZYGOTE)


@dataclass
class Process:
    """One device process, with the last known incarnation of each of its devices."""

    devices: list[int]
    incarnations: dict[int, int]
    joined: set[int] = field(default_factory=set)
    failures: int = 0
    retired: bool = False


class DeviceProcesses:
    """All device processes of one machine, with ``per_process`` devices in each.

    Calls ``died`` with (device, incarnation) for every life that has ended, ``process_ended`` with the number of every
    process that has ended, and ``failed`` with an error that another start would not mend. ``zygote`` forks them.
    """

    def __init__(
        self,
        zygote: ForkingProcess,
        setup: Setup,
        devices: Sequence[int],
        per_process: int,
        first_incarnation: int,
        observer: MachineObserver,
        *,
        died: Callable[[int, int], None],
        process_ended: Callable[[int], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._zygote = zygote
        self._setup = setup
        self._observer = observer
        self._died = died
        self._process_ended = process_ended
        self._failed = failed
        self._loop = asyncio.get_running_loop()
        groups = [[*devices[start : start + per_process]] for start in range(0, len(devices), per_process)]
        self._processes = [Process(group, dict.fromkeys(group, first_incarnation)) for group in groups]
        self._pids: dict[int, int] = {}
        """The process ids of the living device processes, by their number."""
        self._number_of = {device: number for number, group in enumerate(groups) for device in group}
        self._keeping: asyncio.Task[None] | None = None
        self._prepared: asyncio.Future[None] = self._loop.create_future()
        self._born: float | None = None
        """When the zygote was ready. None as long as it is not, and cannot fork."""
        self._joined = self._retired = 0
        self._attached = self._launched = False
        self._stopping = False
        self._all_ended = asyncio.Event()
        self._pauses: dict[int, asyncio.TimerHandle] = {}
        """The processes that are started again after a pause, because they have ended too early."""

    def __len__(self) -> int:
        """The number of processes, dead ones included."""
        return len(self._processes)

    def used(self) -> float:
        """The CPU that all device processes have used so far, those that have ended included, in seconds."""
        return used(self._pids.values()) + used_by_ended(self._zygote.pid)

    @property
    def placed(self) -> list[tuple[int, Sequence[int]]]:
        """The process ids of the living device processes, each with its devices."""
        return [(pid, self._processes[number].devices) for number, pid in self._pids.items()]

    @property
    def zygote(self) -> int:
        """The process id of the zygote."""
        return self._zygote.pid

    async def prepare(self) -> None:
        """Tell the zygote what it is for, and wait until it can fork. Raises FedemuError if it cannot."""
        self._keeping = self._loop.create_task(self._keep())
        listen(self._keeping, self._fail)
        await self._prepared

    def launch(self) -> None:
        """Have the zygote fork all processes. A zygote that is starting again does so when it is ready."""
        self._launched = True
        if self._born is not None:
            self._fork_all()
        self._count()

    def wanted_again(self, rouse: Callable[[int, Sequence[tuple[int, int]]], object]) -> None:
        """The coordinator has given this machine its place again. Devices that have retired since begin a new life.

        They had heard that the run is over, and it goes on now. This machine did not hear it, because it stood still at
        that moment. ``rouse`` tells a living process to begin the lives of those devices that have none in it.
        """
        for number, process in enumerate(self._processes):
            if process.retired:
                process.retired = False
                self._retired -= len(process.devices)
                if self._born is not None:
                    self._fork(number)
            elif number in self._pids and len(process.incarnations) > 1:
                # Some of its devices may have retired, and not all. In packs whoever is asked is woken. What is known
                # of the others stays true, and the next fork begins above these lives.
                known = process.incarnations.items()
                rouse(number, [(device, incarnation + BIRTH_STRIDE // 2) for device, incarnation in known])
        self._count()

    def joined(self, device: int, incarnation: int) -> None:
        """The coordinator has made the device a member."""
        process = self._processes[self._number_of[device]]
        process.incarnations[device] = max(incarnation, process.incarnations[device])
        self._joined += device not in process.joined
        process.joined.add(device)
        process.failures = 0
        self._count()

    async def stop(self, farewell: Callable[[], None] | None, seconds: float) -> None:
        """End all processes and the zygote.

        ``farewell`` is called first, if given; then the processes have ``seconds`` to end by themselves.
        """
        self._stopping = True
        self._end_pauses()
        if farewell is not None and self._pids:
            self._all_ended.clear()
            farewell()
            try:
                async with asyncio.timeout(seconds):
                    await self._all_ended.wait()
            except TimeoutError:
                log.warning("%d device processes did not end in time; they are killed", len(self._pids))
        if self._keeping is not None:  # first, because it may be starting another zygote
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        await self._zygote.stop()
        self._prepared.cancel()

    async def _keep(self) -> None:
        """Keep the zygote alive. The kernel kills its children with it. Raises FedemuError if that cannot be done."""
        failures = 0
        while True:
            code = await self._zygote.follow(self._heard, lambda: self._zygote.tell(self._setup))
            if self._stopping:
                return
            born, self._born = self._born, None
            joined = any(process.joined for process in self._processes)
            fruitful = born is not None and (joined or self._loop.time() >= born + SHORT_SECONDS)
            failures = 0 if fruitful else failures + 1
            if born is None and (code >= 0 or failures >= MOST_FAILURES):
                raise ConfigurationError(f"No device process can be started: the zygote {ending(code)}.")
            if failures >= MOST_FAILURES:
                raise FedemuError(
                    f"The zygote, which forks the device processes, failed {failures} times in a row; "
                    f"at last it {ending(code)}."
                )
            log.warning("the zygote %s%s; starting it again", ending(code), " before it was ready" * (born is None))
            self._observer.restarted("zygote")
            self._end_pauses()  # the new zygote starts all of them
            for number in [*self._pids]:
                self._bury(number)
            if born is not None and failures > 1:
                await asyncio.sleep(0.05 * 2**failures)
            self._zygote = await self._zygote.again()

    def _heard(self, message: Message) -> None:
        match message:
            case ZygoteReady():
                self._born = self._loop.time()
                if not self._prepared.done():
                    self._prepared.set_result(None)
                if self._launched:
                    self._fork_all()
            case Forked():
                self._pids[message.number] = message.pid
            case NotForked():
                self._fork_later(message.number, f"could not be started: {message.detail}")
            case Ended():
                self._ended(message.number, message.code)
            case Broken():
                self._fail(ConfigurationError(message.detail))

    def _fail(self, error: BaseException) -> None:
        if not self._prepared.done():
            fail(self._prepared, error)
        else:
            self._failed(error)

    def _fork_all(self) -> None:
        for number, process in enumerate(self._processes):
            if not process.retired:
                self._fork(number)

    def _fork(self, number: int) -> None:
        if self._stopping:
            return
        process = self._processes[number]
        for device in process.devices:
            process.incarnations[device] += BIRTH_STRIDE
        lives = tuple((device, process.incarnations[device]) for device in process.devices)
        self._zygote.tell(Fork(number=number, lives=lives))

    def _bury(self, number: int) -> None:
        process = self._processes[number]
        self._pids.pop(number, None)
        self._joined -= len(process.joined)
        process.joined.clear()
        self._process_ended(number)
        if not process.retired:  # a retired process has said goodbye itself
            for device in process.devices:
                self._died(device, process.incarnations[device])
        self._count()

    def _ended(self, number: int, code: int) -> None:
        process = self._processes[number]
        as_planned = code in (0, -signal.SIGKILL) and bool(process.joined)
        self._retired += len(process.devices) * ((code == RETIRED) - process.retired)
        process.retired = code == RETIRED
        self._bury(number)
        if not self._pids:
            self._all_ended.set()
        if self._stopping or process.retired:
            return
        self._observer.restarted("device")
        if as_planned:  # somebody else may have killed it, which makes no difference
            self._fork(number)
            return
        logs = Path(self._setup.logs) / f"device-{number}.log" if self._setup.logs else "the output above"
        self._fork_later(number, f"{ending(code)}; see {logs}")

    def _fork_later(self, number: int, why: str) -> None:
        """Start a process again after a pause that is longer every time, or give the machine up after some times."""
        process = self._processes[number]
        process.failures += 1
        if process.failures >= MOST_FAILURES:
            times = process.failures
            self._failed(FedemuError(f"Device process {number} failed {times} times in a row; at last it {why}."))
            return
        self._pauses[number] = self._loop.call_later(0.05 * 2**process.failures, self._fork, number)

    def _end_pauses(self) -> None:
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()

    def _count(self) -> None:
        joined, retired, total = self._joined, self._retired, len(self._number_of)
        self._observer.devices({"connected": joined, "starting": total - joined - retired, "stopped": retired})
        if joined == total and not self._attached:
            self._attached = True
            mark("devices", "attach", lambda: {"devices": self.used()})
