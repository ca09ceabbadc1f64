"""The inside of a server job's process: its steps, their checkpoints, and what it tells its parent by a pipe."""

from __future__ import annotations

import gc
import json
import os
import signal
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from fedemu.algorithms.interface import ServerJob
from fedemu.coordinator.record import checkpoint
from fedemu.protocol.host.kernel import end_with_parent

_REPORT_SECONDS = 0.2


@dataclass(frozen=True)
class Place:
    """Where a job's carry is kept, and under which name."""

    directory: Path
    round: int
    attempt: int
    ordinal: int


def work(job: ServerJob, place: Place, threads: int, pipe: int, parent: int) -> NoReturn:
    """Live as the child of process ``parent``: run the job, report by lines of JSON on ``pipe``, and exit."""
    code = 1
    try:
        settle(pipe, parent)
        torch.set_num_threads(threads)
        run(job, place, lambda step: _tell(pipe, {"step": step}))
        code = 0
    except BaseException as error:
        _tell(pipe, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(code)


def run(job: ServerJob, place: Place, stepped: Callable[[int], None]) -> None:
    """Take the job from its newest checkpoint, or its beginning, to its end.

    After every checkpoint the carry goes on as a load would give it back, so a job that was killed and one that was
    not compute on equal bits in equal memory layout.
    """

    def keep(finished: bool) -> None:
        checkpoint.save_job(
            place.directory, place.round, place.ordinal, step, carry, finished=finished, attempt=place.attempt
        )

    known = checkpoint.load_job(place.directory, place.round, place.ordinal, attempt=place.attempt)
    if known is not None:
        step, carry, finished = known.step, known.carry, known.finished
    else:
        step, carry, finished = 0, checkpoint.canonical(job.init()), False
    reported = 0.0
    while not finished and step < job.steps:
        carry, finished = job.step(carry, step)
        step += 1
        if not finished and step < job.steps and step % job.checkpoint_every == 0:
            keep(False)
            carry = checkpoint.canonical(carry)
        if time.monotonic() - reported > _REPORT_SECONDS:
            stepped(step)
            reported = time.monotonic()
    keep(True)
    stepped(step)


def settle(pipe: int, parent: int) -> None:
    """Become a process of its own: die with the parent, hear no signals of its loop, hold none of its connections."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    end_with_parent(parent, code=1)
    _let_go_of_sockets(pipe)
    gc.freeze()  # what the parent made is never collected here


def _let_go_of_sockets(pipe: int) -> None:
    """Point inherited sockets at the null device: peers see a killed coordinator go at once, its port is free again.

    They are not closed, because a file that the job opens would then get a number that inherited objects still use.
    """
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir(folder)):
        try:
            if descriptor > 2 and descriptor != pipe and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.dup2(null, descriptor)
        except OSError:  # the folder's own descriptor, gone by now
            continue


def _tell(pipe: int, message: dict[str, object]) -> None:
    try:
        os.write(pipe, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        os._exit(1)
