"""The device processes of a machine, as their supervisor sees them.

The zygote starts them, and starts them again when they end.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fedemu.device.machine.forkers import begun, ended, killed
from fedemu.device.machine.observer import MachineObserver
from fedemu.device.pipe import (
    FROM_ZYGOTE,
    Broken,
    Ended,
    Fork,
    Forked,
    NotForked,
    Setup,
    Unpacker,
    ZygoteReady,
    pack_message,
)
from fedemu.device.process.process import RETIRED
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.futures import fail, listen
from fedemu.protocol.host.phases import mark, used, used_by_ended
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


class Zygote:
    """The process that forks device processes, from its start on. It imports what they need, beside anything else."""

    def __init__(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        self.process = process
        self.ours = ours

    @classmethod
    async def start(cls, environment: Mapping[str, str] | None = None) -> Zygote:
        """Start a zygote. ``environment`` are variables that it needs beside those that all of them have."""
        return cls(*await begun(*COMMAND, environment=ZYGOTE_ENVIRONMENT | dict(environment or {})))

    async def stop(self) -> None:
        """End it. Only ``DeviceProcesses`` has it fork, and stops it first, so there are no children."""
        self.ours.close()
        await killed(self.process)


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
    process that has ended, and ``failed`` with an error that another start would not mend. ``zygote`` is one that was
    started with this ``environment``, before it was known what it is for.
    """

    def __init__(
        self,
        setup: Setup,
        devices: Sequence[int],
        per_process: int,
        first_incarnation: int,
        observer: MachineObserver,
        *,
        died: Callable[[int, int], None],
        process_ended: Callable[[int], None],
        failed: Callable[[BaseException], None],
        environment: Mapping[str, str] | None = None,
        zygote: Zygote | None = None,
    ) -> None:
        self._setup = setup
        self._first_zygote = zygote
        self._environment = dict(environment or {})
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
        self._zygote: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._following: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._born = 0.0
        """When the zygote was ready."""
        self._zygote_failures = 0
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
        ended = used_by_ended(self._zygote.pid) if self._zygote is not None else 0.0
        return used(self._pids.values()) + ended

    @property
    def placed(self) -> list[tuple[int, Sequence[int]]]:
        """The process ids of the living device processes, each with its devices."""
        return [(pid, self._processes[number].devices) for number, pid in self._pids.items()]

    @property
    def zygote(self) -> int | None:
        """The process id of the zygote, None before there is one."""
        return None if self._zygote is None else self._zygote.pid

    async def prepare(self) -> None:
        """Start the zygote and wait until it can fork. Raises FedemuError if it cannot."""
        await self._start_zygote()
        await self._ready

    async def _start_zygote(self) -> None:
        """Start the zygote, or take the first one, and hear what it says. Raises FedemuError if none can be started."""
        zygote, self._first_zygote = self._first_zygote, None
        if zygote is None:
            zygote = await Zygote.start(self._environment)
        self._zygote = zygote.process
        reader, self._writer = await asyncio.open_connection(sock=zygote.ours)
        self._writer.write(pack_message(self._setup))
        self._following = self._loop.create_task(self._follow(reader))
        listen(self._following, self._fail)

    def launch(self) -> None:
        """Have the zygote fork all processes. A zygote that is starting again does so when it is ready."""
        self._launched = True
        if not self._is_starting:
            self._fork_all()
        self._count()

    def wanted_again(self, rouse: Callable[[int, Sequence[tuple[int, int]]], object]) -> None:
        """The coordinator has given this machine its place again. Devices that have retired since begin a new life.

        They have heard the end of a run that goes on now, and this machine has not, as it stood still just then.
        ``rouse`` has a process that lives begin these lives, where it has no life of the device.
        """
        for number, process in enumerate(self._processes):
            if process.retired:
                process.retired = False
                self._retired -= len(process.devices)
                if not self._is_starting:
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
        if self._starting is not None:
            self._starting.cancel()
        if farewell is not None and self._pids:
            self._all_ended.clear()
            farewell()
            try:
                async with asyncio.timeout(seconds):
                    await self._all_ended.wait()
            except TimeoutError:
                log.warning("%d device processes did not end in time; they are killed", len(self._pids))
        if self._writer is not None:
            self._writer.close()  # the zygote then kills its children and ends
        if self._zygote is not None:
            await (ended if self._ready.done() else killed)(self._zygote)
        tasks = [task for task in (self._following, self._starting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._ready.done():
            self._ready.cancel()

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        unpacker = Unpacker(FROM_ZYGOTE)
        try:
            while data := await reader.read(2**16):
                for message in unpacker.feed(data):
                    self._heard(message)
        except ConnectionError:
            pass
        if not self._stopping:
            await self._restart_zygote()

    def _heard(self, message: object) -> None:
        match message:
            case ZygoteReady():
                if not self._ready.done():
                    self._born = self._loop.time()
                    self._ready.set_result(None)
            case Forked():
                self._pids[message.number] = message.pid
            case NotForked():
                self._fork_later(message.number, f"could not be started: {message.detail}")
            case Ended():
                self._ended(message.number, message.code)
            case Broken():
                self._fail(ConfigurationError(message.detail))

    def _fail(self, error: BaseException) -> None:
        if not self._ready.done():
            fail(self._ready, error)
        else:
            self._failed(error)

    async def _restart_zygote(self) -> None:
        """Start a new zygote and all processes. The kernel has killed the children of the old one with it."""
        assert self._zygote is not None
        code = await self._zygote.wait()
        if not self._ready.done():
            self._zygote_failures += 1
            if code >= 0 or self._zygote_failures >= MOST_FAILURES:
                self._fail(ConfigurationError(f"No device process can be started: the zygote {ending(code)}."))
                return
            log.warning("the zygote %s before it was ready; starting it again", ending(code))
            self._observer.restarted("zygote")
            if self._writer is not None:
                self._writer.close()
            try:
                await self._start_zygote()
            except FedemuError as error:
                self._fail(error)
            return
        joined = any(process.joined for process in self._processes)
        fruitful = joined or self._loop.time() >= self._born + SHORT_SECONDS
        self._zygote_failures = 0 if fruitful else self._zygote_failures + 1
        if self._zygote_failures >= MOST_FAILURES:
            times = self._zygote_failures
            self._fail(
                FedemuError(
                    f"The zygote, which forks the device processes, failed {times} times in a row; "
                    f"at last it {ending(code)}."
                )
            )
            return
        log.warning("the zygote %s; starting it again", ending(code))
        self._observer.restarted("zygote")
        if self._writer is not None:
            self._writer.close()
        self._end_pauses()  # the new zygote starts all of them
        for number in [*self._pids]:
            self._bury(number)
        self._ready = self._loop.create_future()
        self._starting = self._loop.create_task(self._start_again())
        listen(self._starting, self._fail)

    async def _start_again(self) -> None:
        if self._zygote_failures > 1:
            await asyncio.sleep(0.05 * 2**self._zygote_failures)
        try:
            await self.prepare()
        except FedemuError as error:
            self._failed(error)
            return
        if self._launched:
            self._fork_all()

    @property
    def _is_starting(self) -> bool:
        """Whether a zygote is on its way, which forks all processes as soon as it is ready."""
        return not self._ready.done() or (self._starting is not None and not self._starting.done())

    def _fork_all(self) -> None:
        for number, process in enumerate(self._processes):
            if not process.retired:
                self._fork(number)

    def _fork(self, number: int) -> None:
        if self._stopping or self._writer is None:
            return
        process = self._processes[number]
        for device in process.devices:
            process.incarnations[device] += BIRTH_STRIDE
        lives = tuple((device, process.incarnations[device]) for device in process.devices)
        self._writer.write(pack_message(Fork(number=number, lives=lives)))

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
