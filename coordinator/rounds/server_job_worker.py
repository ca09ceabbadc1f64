"""The process of a server job from inside: its steps, their checkpoints, and the pipe to its parent."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import signal
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from fedemu.algorithms.interface import ServerJob, Tree
from fedemu.algorithms.models.randomness.draws import Draws, keys
from fedemu.algorithms.models.randomness.private_functions import keeping_activations
from fedemu.algorithms.models.randomness.random_functions import models_draw_by
from fedemu.algorithms.training.job_device import gpu_lacks_memory, gpu_or_processor, jobs_compute_on
from fedemu.coordinator.record import checkpoint
from fedemu.coordinator.settings import Settings
from fedemu.protocol.code.own_code import account, told
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.hardware import settle_gpu_libraries
from fedemu.protocol.host.kernel import end_with_parent, name_process
from fedemu.protocol.seeds import integer
from fedemu.protocol.wording import an_object

_UNOPENED: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""The variable of the environment with which ``torch.cuda.is_available`` asks the driver and opens no GPU."""
_REPORT_SECONDS = 0.2
SAVE_SECONDS = 1.0
"""The least time between two checkpoints of a job. To write one takes longer than many a step."""


@dataclass(frozen=True)
class Place:
    """The place of a server job in a run, by which its checkpoint is named, and the seed of the run.

    ``basis`` names what the job begins from. A checkpoint of a job that began from something else is not used.
    """

    directory: Path
    round: int
    attempt: int
    ordinal: int
    seed: int = 0
    basis: str = ""

    def reached(self) -> checkpoint.JobState | None:
        """How far the job is, None if it has not begun."""
        return checkpoint.load_job(self.directory, self.round, self.ordinal, attempt=self.attempt, basis=self.basis)

    def key(self, step: int) -> NDArray[np.int32]:
        """The key ``[2]`` of what is drawn in a step: a function of seed, round, job and step. -1 is before them."""
        seed = integer(self.seed, round=self.round, purpose=f"draws/{self.ordinal}")
        key: NDArray[np.int32] = keys(np.array([seed], np.uint64), np.array([step]))[0]
        return key


def run_and_exit(job: ServerJob, place: Place, settings: Settings, pipe: int, parent: int) -> NoReturn:
    """The life of the child of process ``parent``: run the job, report by lines of JSON on ``pipe``, and exit."""
    code = 1
    try:
        settle(pipe, parent)
        name_process("fedemu-job")
        torch.set_num_threads(settings.threads)
        os.environ.pop(_UNOPENED, None)  # the driver may know a GPU that this torch cannot open
        settle_gpu_libraries()
        with jobs_compute_on(partial(gpu_or_processor, settings.device_type)), _advising():
            run(job, place, lambda step: _tell(pipe, {"step": step}))
        code = 0
    except BaseException as error:
        _tell(pipe, {"error": told(error, account(error))})
    finally:
        os._exit(code)


def leave_gpu_to_jobs() -> None:
    """Prepare this process for the forks of jobs: somebody's own code may ask torch whether there is a GPU.

    Many a module asks when it is imported, to choose a device. torch would open the GPU, and a forked process could not
    use it then.
    """
    os.environ[_UNOPENED] = "1"


@contextmanager
def _advising() -> Iterator[None]:
    """Raise ConfigurationError with advice if a GPU has too little memory."""
    try:
        yield
    except RuntimeError as error:
        if not gpu_lacks_memory(error):
            raise
        first = str(error).splitlines()[0].partition(". ")[0]
        raise ConfigurationError(
            f"{first}. Trainers and server jobs share the memory of a GPU: a smaller local.stack leaves more of it to "
            "server jobs, and with --device-type cpu they need none"
        ) from error


def run(job: ServerJob, place: Place, stepped: Callable[[int], None]) -> None:
    """Run the job to its end, from its newest checkpoint or from its beginning.

    Where there may be a checkpoint, the carry is replaced by what a load would give back, on the device where it lies.
    So a job that was killed computes with the same bits in the same memory layout as one that was not. It also draws
    the same numbers in each step. A checkpoint is written there the first time, and later whenever the last one is
    older than ``SAVE_SECONDS``.
    """

    def keep(finished: bool) -> None:
        path = place.directory, place.round, place.ordinal
        checkpoint.save_job(*path, step, carry, finished=finished, attempt=place.attempt, basis=place.basis)

    _seed_generators(place.key(-1), at_first=True)
    known = place.reached()
    if known is not None:
        step, carry, finished = known.step, known.carry, known.finished
    else:
        step, carry, finished = 0, checkpoint.canonical(_tree(job.init(), "its init must return")), False
    reported, saved, begun = 0.0, -math.inf, step
    while not finished and step < job.steps:
        _seed_generators(key := place.key(step), at_first=step == begun)
        with models_draw_by(Draws(torch.from_numpy(key))), keeping_activations():
            carry, finished = _checked(job.step(carry, step))
        step += 1
        if not finished and step < job.steps and step % job.checkpoint_every == 0:
            carry = checkpoint.canonical(carry)
            if time.monotonic() - saved >= SAVE_SECONDS:
                keep(False)
                saved = time.monotonic()
        if time.monotonic() - reported > _REPORT_SECONDS:
            stepped(step)
            reported = time.monotonic()
    keep(True)
    stepped(step)


def _seed_generators(key: NDArray[np.int32], *, at_first: bool) -> None:
    """Let Python, numpy and torch draw by a key ``[2]``: a job may draw by them, and models draw by keys anyway.

    ``at_first`` also seeds a GPU that this process does not use yet, which takes longer than many a step.
    """
    seed = int(key.view(np.uint64)[0]) >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if at_first:
        torch.manual_seed(seed)
        return
    for each in (torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())):  # type: ignore[no-untyped-call]
        each.manual_seed(seed)


def _checked(result: object) -> tuple[Tree, bool]:
    """What a step has returned. Raises ConfigurationError if it is something else."""
    match result:
        case (carry, finished):
            return _tree(carry, "the first of the two things that its step returns must be"), bool(finished)
    raise ConfigurationError(
        "its step must return two things, the next tree and whether the job is finished, and returned "
        f"{an_object(result)}"
    )


def _tree(found: object, must: str) -> Tree:
    """A tree that a job has made. Raises ConfigurationError, which begins with ``must``, if it is something else."""
    wanted = f"{must} a tree, which has tensors by name"
    if not isinstance(found, Mapping):
        raise ConfigurationError(f"{wanted}, and not {an_object(found)}")
    for name, leaf in found.items():
        if not isinstance(name, str):
            raise ConfigurationError(f"{wanted}, and not by {name!r}")
        if not isinstance(leaf, torch.Tensor):
            advice = "; flatten(...) makes one tree of trees by name" if isinstance(leaf, Mapping) else ""
            raise ConfigurationError(f"{wanted}, and not {an_object(leaf)} as {name!r}{advice}")
        if leaf.layout is not torch.strided:
            raise ConfigurationError(f"{wanted}, and not a sparse one as {name!r}; to_dense() makes it dense")
    return found


def settle(pipe: int, parent: int) -> None:
    """Separate this process from its parent's event loop, signals and connections, and let it die with the parent."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):  # a terminal tells all processes of the group, and the parent decides
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(parent, code=1)
    _let_go_of_sockets(pipe)
    gc.freeze()  # the garbage collector never touches objects of the parent here


def _let_go_of_sockets(pipe: int) -> None:
    """Replace inherited sockets by the null device.

    So peers see at once when the coordinator is killed, and its port is free again. The sockets are not closed, because
    a file that the job opens would then get a number that inherited objects still use.
    """
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in map(int, os.listdir(folder)):
        try:
            if descriptor > 2 and descriptor != pipe and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.dup2(null, descriptor)
        except OSError:  # this is the descriptor of the folder itself, which is closed by now
            continue


def _tell(pipe: int, message: dict[str, object]) -> None:
    try:
        os.write(pipe, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        os._exit(1)
