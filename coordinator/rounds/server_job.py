"""A ServerJob runs in a process of its own, so that the event loop goes on, and the job can be killed and resumed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from fedemu.algorithms.interface import ServerJob, Tree
from fedemu.coordinator.rounds.server_job_worker import Place, run_and_exit
from fedemu.coordinator.settings import Settings
from fedemu.protocol.code.own_code import Told, retold
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.futures import fail
from fedemu.protocol.host.idleness import Idleness, Stuckness
from fedemu.protocol.wording import refusal, signal_name

_TRIES = 2
_LOOK_MILLISECONDS = 500
"""The time between two looks at a silent child. Normally its end is seen at once, because its pipe ends."""


async def run_server_job(
    job: ServerJob, place: Place, settings: Settings, report: Callable[[int], None], died: Callable[[str], None]
) -> Tree:
    """Run the job to its end, from its beginning or from where an earlier process left it in its ``place``.

    The result is the job's last carry. A finished job is not run again, and one that was begun is continued. A process
    that dies is replaced once. Raises FedemuError if the second one dies too, if the system lets none start, or if the
    job raises, and ConfigurationError if the job makes something else than trees, or if a GPU lacks memory. ``report``
    gets the number of steps that are done, on the event loop; its last call tells how many the job took. ``died`` gets
    the cause of each death. Cancellation kills the process and keeps its checkpoint. The ``settings`` tell how
    many threads that process has, whether it may use a GPU, and for how long it may use no processor time, or finish no
    step, before it is killed.

    The process is forked, because a job is made of closures, which no other start method can carry over. No thread may
    compute meanwhile: the child would wait for ever for a lock that the thread holds, such as that of oneDNN. This is
    safe beside the threads of ZeroMQ and OpenMP for three reasons. The thread that forks has never computed, so OpenMP
    finds no worker pool to wait for. The event loop stands still meanwhile, so it holds no lock. The child uses no
    inherited socket and ends by ``_exit``, so no inherited object is torn down. The child can use neither CUDA nor
    gradients if this process has used CUDA, as trainers do that compute in it. So that is refused with a
    ConfigurationError.
    """
    loop = asyncio.get_running_loop()

    def stepped(step: int) -> None:
        loop.call_soon_threadsafe(report, step)

    def finished() -> Tree | None:
        done = place.reached()
        if done is None or not done.finished:
            return None
        report(done.step)
        return done.carry

    if (carry := finished()) is not None:
        return carry
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigurationError(
            f"the server job {job.name!r} needs a process of its own, which cannot be had once this process has used a "
            "GPU; use --transport zmq, or use no GPU in this process (--device-type cpu)"
        )
    cause = ""
    for _ in range(_TRIES):
        try:
            ended = await _Child(job, place, settings, stepped).run(loop)
        except OSError as error:
            raise FedemuError(
                f"The process of the server job {job.name!r} cannot be started in round {place.round}: "
                f"{refusal(error)}, and go on with --resume."
            ) from error
        if ended.error is not None:
            said = f"The server job {job.name!r} failed: {ended.error.sentence}"
            kind = ConfigurationError if ended.error.exit_code == ConfigurationError.exit_code else FedemuError
            raise retold(ended.error._replace(sentence=said), kind)
        if (carry := finished()) is not None:
            return carry
        cause = ended.killed or _death(ended.status)
        died(cause)
    raise FedemuError(
        f"The server job {job.name!r} of round {place.round} died {_TRIES} times, lastly by {cause}; "
        "its checkpoint is kept; go on from there with --resume."
    )


class _End(NamedTuple):
    """The end of a process. ``killed`` says why it was killed by this one, if it was."""

    status: int
    error: Told | None
    killed: str = ""


class _Child:
    """A forked process and the thread that is its parent. On Linux the child dies with that thread."""

    def __init__(self, job: ServerJob, place: Place, settings: Settings, stepped: Callable[[int], None]) -> None:
        self._job = job
        self._place = place
        self._settings = settings
        self._stepped = stepped
        self._pid: int | None = None
        self._status = 0
        self._reaping = threading.Lock()
        self._idleness, self._stuckness = Idleness(settings.idle_seconds), Stuckness(settings.stuck_seconds)
        self._finished = 0
        self._killed = ""

    async def run(self, loop: asyncio.AbstractEventLoop) -> _End:
        """Run the child to its end. A cancellation kills it first."""
        result: asyncio.Future[_End] = loop.create_future()
        forked = threading.Event()

        def live() -> None:
            end: _End | BaseException
            try:
                end = self._live(forked)
            except BaseException as error:
                end = error
            forked.set()
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_settle, result, end)

        thread = threading.Thread(target=live, name=f"server-job-{self._job.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # for a thread the system has the same limit as for a process
            raise BlockingIOError(errno.EAGAIN, str(error)) from error
        forked.wait()  # takes milliseconds, and the event loop has to stand still meanwhile
        try:
            return await asyncio.shield(result)
        finally:
            self._kill()
            thread.join()

    def _live(self, forked: threading.Event) -> _End:
        reading, writing = os.pipe()
        try:
            try:
                self._pid = self._fork(writing)
            finally:
                os.close(writing)
            forked.set()
            error: Told | None = None
            for line in self._lines(reading):
                message = json.loads(line)
                if "error" in message:
                    error = Told(*message["error"])
                if "step" in message:
                    self._finished += 1
                    self._stepped(message["step"])
            while not self._reap():
                time.sleep(0.001)  # its pipe is closed, so the child is about to end
            return _End(self._status, error, self._killed)
        finally:
            os.close(reading)

    def _lines(self, reading: int) -> Iterator[bytes]:
        """The whole lines that the child writes, until it has ended. One that a kill has cut short is left out."""
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        rest = b""
        while True:
            ended = self._reap()  # before the look: whatever it has written is there then
            if poll.poll(0 if ended else _LOOK_MILLISECONDS):
                chunk = os.read(reading, 1 << 16)
                if not chunk:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
            elif ended:  # a process that the job started holds the pipe open
                return
            elif self._pid is not None and (why := self._hangs(self._pid, time.monotonic())):
                self._killed = why
                self._kill()

    def _hangs(self, pid: int, now: float) -> str:
        """Why the child is to be killed. Empty if it is not."""
        settings = self._settings
        if self._idleness.look({0: pid}, now):
            return f"being killed, because it used no processor time for {settings.idle_seconds:g} s"
        if self._stuckness.look({0: (pid, self._finished)}, now):
            return f"being killed, because it finished no step for {settings.stuck_seconds:g} s (runtime.stuck_seconds)"
        return ""

    def _reap(self) -> bool:
        """Whether the child has ended. Its process id may belong to another process from then on."""
        with self._reaping:
            if self._pid is not None:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._pid, self._status = None, status
            return self._pid is None

    def _kill(self) -> None:
        with self._reaping:
            if self._pid is not None:
                os.kill(self._pid, signal.SIGKILL)

    def _fork(self, writing: int) -> int:
        parent = os.getpid()
        with warnings.catch_warnings():
            # From Python 3.12 on, a fork beside threads gives a warning. run_server_job says why it is safe here.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            run_and_exit(self._job, self._place, self._settings, writing, parent)
        return pid


def _settle(result: asyncio.Future[_End], end: _End | BaseException) -> None:
    if isinstance(end, BaseException):
        fail(result, end)
    elif not result.done():
        result.set_result(end)


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        return signal_name(os.WTERMSIG(status))
    return f"exit code {os.waitstatus_to_exitcode(status)}"
