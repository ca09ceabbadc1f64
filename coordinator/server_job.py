"""Running a ServerJob in a process of its own, off the event loop, so that it can be killed and resumed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from fedemu.algorithms.interface import ServerJob, Tree
from fedemu.coordinator import checkpoint
from fedemu.coordinator.server_job_worker import Place, work
from fedemu.protocol.errors import FedemuError

Progress = Callable[[int, int], None]
"""(steps done, steps at most), called on the event loop."""

_TRIES = 2


async def run_server_job(
    job: ServerJob,
    directory: Path,
    round: int,
    ordinal: int,
    progress: Progress,
    *,
    attempt: int = 0,
    threads: int = 1,
) -> Tree:
    """The job's last carry, from the start or from where an earlier process left it in ``directory``.

    A finished job is not run again. A process that dies is replaced once; FedemuError if the second dies too or if the
    job raises. Cancelling kills the process and keeps its checkpoint. ``threads`` are torch's in that process.

    The process is forked, because a job is made of closures that no other start method can carry over. Three things
    make that safe beside ZeroMQ's and OpenMP's threads: the child is born of a thread that has never computed, so
    OpenMP finds no worker pool to wait for; it touches no inherited socket; and it leaves by ``_exit``, so no
    inherited object is torn down. CUDA can be used in the child only where the coordinator itself has not.
    """
    place = Place(directory, round, attempt, ordinal)
    loop = asyncio.get_running_loop()
    for _ in range(_TRIES):
        done = checkpoint.load_job(directory, round, ordinal, attempt=attempt)
        if done is not None and done.finished:
            return done.carry
        child = _Child(job, place, threads, lambda step: loop.call_soon_threadsafe(progress, step, job.steps))
        ended = await _supervise(child, loop)
        if ended.error is not None:
            raise FedemuError(f"The server job {job.name!r} failed: {ended.error}")
    done = checkpoint.load_job(directory, round, ordinal, attempt=attempt)
    if done is not None and done.finished:
        return done.carry
    raise FedemuError(
        f"The server job {job.name!r} of round {round} died {_TRIES} times, lastly by {_death(ended.status)}; "
        "its checkpoint is kept, so --resume goes on from there."
    )


@dataclass(frozen=True)
class _Ended:
    status: int
    error: str | None


@dataclass
class _Child:
    """A forked process and the thread that is its parent: Linux kills the child when that thread ends."""

    job: ServerJob
    place: Place
    threads: int
    stepped: Callable[[int], None]
    pid: int | None = None
    started: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False

    def run(self) -> _Ended:
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # From Python 3.12 on a fork beside threads warns; the docstring of run_server_job tells why it is safe
            # here.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pid = os.fork()
            except OSError:
                os.close(reading)
                os.close(writing)
                self.started.set()
                raise
        if pid == 0:
            work(self.job, self.place, self.threads, writing)
        self.pid = pid
        os.close(writing)
        self.started.set()
        with open(reading, "rb") as pipe:
            error = self._listen(pipe)
        _, status = os.waitpid(pid, 0)
        self.pid = None
        return _Ended(status, error)

    def _listen(self, pipe: BinaryIO) -> str | None:
        error = None
        for line in pipe:
            with contextlib.suppress(ValueError):  # a line cut short by a kill
                message = json.loads(line)
                if "error" in message:
                    error = message["error"]
                elif not self.cancelled:
                    with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                        self.stepped(message["step"])
        return error


async def _supervise(child: _Child, loop: asyncio.AbstractEventLoop) -> _Ended:
    """Run the child's thread to its end; on cancellation kill the process first."""
    result: asyncio.Future[_Ended] = loop.create_future()

    def settle(ended: _Ended | None, error: BaseException | None) -> None:
        if result.done():
            return
        if error is not None:
            result.set_exception(error)
        elif ended is not None:
            result.set_result(ended)

    def live() -> None:
        ended, failure = None, None
        try:
            ended = child.run()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, ended, failure)

    thread = threading.Thread(target=live, name=f"server-job-{child.job.name}", daemon=True)
    thread.start()
    # The fork takes milliseconds; while it happens the event loop stands still and holds no lock that the child would
    # inherit.
    child.started.wait()
    try:
        return await asyncio.shield(result)
    finally:
        if thread.is_alive():
            child.cancelled = True
            if (pid := child.pid) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            thread.join()


def _death(status: int) -> str:
    if os.WIFSIGNALED(status):
        return f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
