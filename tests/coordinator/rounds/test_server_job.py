"""Server jobs in a process of their own: results, checkpoints, deaths and cancellation."""

import asyncio
import errno
import multiprocessing
import os
import random
import re
import select
import signal
import socket
import stat
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.checkpoint import checkpoint as checkpoint_activations

from fedemu.algorithms.interface import ServerJob, Tree
from fedemu.algorithms.training.job_device import job_device
from fedemu.algorithms.trees import model_digest
from fedemu.coordinator.record import checkpoint
from fedemu.coordinator.rounds import server_job, server_job_worker
from fedemu.coordinator.rounds.server_job import run_server_job
from fedemu.coordinator.rounds.server_job_worker import Place
from fedemu.coordinator.settings import DeviceType, Settings
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.wording import KILLED

Until = Callable[[Callable[[], object]], Awaitable[None]]
SETTINGS = Settings(run="test", seed=0, rounds=1, devices=1, per_round=1)

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def checkpoints_are_not_seconds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_job_worker, "SAVE_SECONDS", 0.0)


def train(step_hook=lambda index: None, steps: int = 12, checkpoint_every: int = 5) -> ServerJob:
    """A job of gradient steps on a quadratic with noise of all generators. The state of one is part of the carry."""

    def init():
        return {"w": torch.rand(8, 4).t(), "random": torch.Generator().manual_seed(3).get_state()}

    def step(carry, index):
        step_hook(index)
        generator = torch.Generator()
        generator.set_state(carry["random"])
        w = carry["w"].clone().requires_grad_()
        noise = torch.randn(w.shape, generator=generator) + torch.rand(w.shape) * random.random() * np.random.random()
        (((w - noise) ** 2).sum() / 3).backward()
        return {"w": (w - 0.1 * w.grad).detach(), "random": generator.get_state()}, False

    return ServerJob("train", init, step, steps, checkpoint_every)


def ignore(step: int) -> None:
    pass


async def played(
    job: ServerJob,
    folder: Path,
    round: int,
    ordinal: int,
    report: Callable[[int], None],
    *,
    attempt: int = 0,
    basis: str = "",
    died: Callable[[str], None] = lambda cause: None,
    **settings: Any,
) -> Tree:
    """Run a job in its place of a run with these settings."""
    of_run = replace(SETTINGS, **settings)
    return await run_server_job(job, Place(folder, round, attempt, ordinal, of_run.seed, basis), of_run, report, died)


def kill_once(marker: Path, at: int, number: int = signal.SIGKILL):
    """A job that kills its own process at one step, the first time only."""

    def hook(index: int) -> None:
        if index == at and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), number)

    return hook


async def test_what_a_job_draws_follows_from_the_seed_the_round_its_place_and_the_step(tmp_path: Path) -> None:
    def with_row(drawn: torch.Tensor, row: int) -> dict[str, torch.Tensor]:
        drawn = drawn.clone()
        drawn[row] = torch.tensor([torch.rand(1).item(), random.random(), np.random.random()])
        return {"drawn": drawn}

    job = ServerJob(
        "draw",
        lambda: with_row(torch.zeros(3, 3, dtype=torch.float64), 0),
        lambda carry, step: (with_row(carry["drawn"], step + 1), False),
        steps=2,
        checkpoint_every=1,
    )

    async def drawn(folder: str, round: int = 1, ordinal: int = 0, seed: int = 0) -> list[float]:
        carry = await played(job, tmp_path / folder, round, ordinal, lambda *_: None, seed=seed)
        return carry["drawn"].reshape(-1).tolist()

    first = await drawn("first")
    assert await drawn("again") == first
    others = [await drawn("round", round=2), await drawn("place", ordinal=1), await drawn("seed", seed=1)]
    every = [number for numbers in (first, *others) for number in numbers]
    assert len({*every}) == 4 * 9, "no number is drawn twice, neither at the beginning nor in a step"


async def test_a_job_runs_in_another_process_and_gives_its_last_carry(tmp_path: Path):
    def step(carry, index):
        named = Path("/proc/self/comm").read_text() == "fedemu-job\n"
        return {"sum": carry["sum"] + index, "pid": torch.tensor(os.getpid()), "named": torch.tensor(named)}, False

    start = {"sum": torch.tensor(0), "pid": torch.tensor(0), "named": torch.tensor(False)}
    job = ServerJob("add", lambda: start, step, 5, 2)
    result = await played(job, tmp_path, 1, 0, ignore)
    assert result["sum"] == 10
    assert result["pid"] != os.getpid()
    assert result["named"]
    assert not psutil.pid_exists(int(result["pid"]))


async def test_a_module_that_computes_activations_again_has_the_gradients_of_variables_from_outside(tmp_path: Path):
    layer = torch.nn.Linear(2, 1, bias=False).requires_grad_(False)

    class Again(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return checkpoint_activations(lambda y: self.layer(y).square(), x, use_reentrant=False)

    def step(carry, index):
        weight = carry["weight"].clone().requires_grad_()
        found = torch.func.functional_call(Again(), {"layer.weight": weight}, (torch.tensor([[2.0, 3.0]]),))
        (slope,) = torch.autograd.grad(found.sum(), weight)
        return {"weight": slope}, True

    job = ServerJob("again", lambda: {"weight": torch.ones(1, 2)}, step, 1, 1)
    assert (await played(job, tmp_path, 1, 0, ignore))["weight"].tolist() == [[20.0, 30.0]]


async def test_the_last_step_is_told_even_where_the_job_was_done_before(tmp_path: Path):
    job = ServerJob("a", lambda: {"n": torch.tensor(0)}, lambda carry, index: (carry, index == 2), 99, 1)
    told = []
    await played(job, tmp_path, 1, 0, told.append)
    assert told[-1] == 3
    told.clear()
    await played(job, tmp_path, 1, 0, told.append)
    assert told == [3]


async def test_a_job_may_finish_early_and_one_without_steps_gives_its_beginning(tmp_path: Path):
    def step(carry, index):
        return {"n": carry["n"] + 1}, index == 2

    assert (await played(ServerJob("a", lambda: {"n": torch.tensor(0)}, step, 99, 1), tmp_path, 1, 0, ignore))["n"] == 3
    assert (await played(ServerJob("b", lambda: {"n": torch.tensor(7)}, step, 0, 1), tmp_path, 1, 1, ignore))["n"] == 7


@pytest.mark.parametrize("at", [0, 4, 5, 7, 11])
async def test_a_job_that_was_killed_has_the_digest_of_one_that_was_not(tmp_path: Path, at: int):
    undisturbed = await played(train(), tmp_path / "a", 1, 0, ignore)
    killed = await played(train(kill_once(tmp_path / "killed", at)), tmp_path / "b", 1, 0, ignore)
    assert (tmp_path / "killed").exists()
    assert model_digest(killed) == model_digest(undisturbed)


async def test_a_killed_job_goes_on_from_its_checkpoint(tmp_path: Path):
    log = tmp_path / "steps"
    kill = kill_once(tmp_path / "killed", 7)

    def hook(index: int) -> None:
        with open(log, "a") as file:
            file.write(f"{index} ")
        kill(index)

    await played(train(hook), tmp_path, 1, 0, ignore)
    assert log.read_text().split() == [*map(str, range(8)), *map(str, range(5, 12))]


async def test_checkpoints_are_a_second_apart_and_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_job_worker, "SAVE_SECONDS", 1.0)
    now = [0.0]  # each step takes 0.4 seconds
    monkeypatch.setattr(server_job_worker, "time", SimpleNamespace(monotonic=lambda: now[0]))
    seen = tmp_path / "seen"

    def hook(index: int) -> None:
        kept = checkpoint.load_job(tmp_path, 1, 0)
        with open(seen, "a") as file:
            file.write(f"{kept.step if kept else 0} ")
        now[0] += 0.4

    found = await played(train(hook, steps=10, checkpoint_every=2), tmp_path, 1, 0, ignore)
    assert seen.read_text() == "0 0 2 2 2 2 6 6 6 6 ", "the first time, and where there may be one after a second"
    monkeypatch.setattr(server_job_worker, "SAVE_SECONDS", 0.0)
    often = await played(train(steps=10, checkpoint_every=2), tmp_path / "often", 1, 0, ignore)
    assert model_digest(found) == model_digest(often)


@pytest.mark.parametrize(
    ("limits", "cause"),
    [
        ({"idle_seconds": 1.5}, "used no processor time for 1.5 s"),
        ({"stuck_seconds": 1.5}, "finished no step for 1.5 s (runtime.stuck_seconds)"),
    ],
    ids=["stands still", "spins"],
)
async def test_a_job_that_hangs_is_killed_and_goes_on_from_its_checkpoint(
    tmp_path: Path, limits: dict[str, float], cause: str
) -> None:
    hung = tmp_path / "hung"

    def hook(index: int) -> None:
        if index == 7 and not hung.exists():
            hung.touch()
            if "idle_seconds" in limits:
                os.kill(os.getpid(), signal.SIGSTOP)
            while True:
                pass

    undisturbed = await played(train(), tmp_path / "a", 1, 0, ignore)
    deaths: list[str] = []
    result = await played(train(hook), tmp_path / "b", 1, 0, ignore, died=deaths.append, **limits)
    assert model_digest(result) == model_digest(undisturbed)
    (told,) = deaths
    assert told == f"being killed, because it {cause}"


async def test_the_cause_of_every_death_is_told(tmp_path: Path):
    causes: list[str] = []
    await played(train(kill_once(tmp_path / "killed", 7)), tmp_path / "a", 1, 0, ignore, died=causes.append)
    assert causes == [KILLED]
    await played(train(), tmp_path / "b", 1, 0, ignore, died=causes.append)
    assert causes == [KILLED]
    nameless = train(kill_once(tmp_path / "ended", 7, signal.SIGRTMIN + 1))
    await played(nameless, tmp_path / "c", 1, 0, ignore, died=causes.append)
    assert causes == [KILLED, f"signal {signal.SIGRTMIN + 1}"]


async def test_a_job_is_refused_where_trainers_have_used_a_gpu_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No process that is forked from it can compute gradients. What was finished before is still given."""
    await played(train(), tmp_path, 1, 0, ignore)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert "w" in await played(train(), tmp_path, 1, 0, ignore)
    with pytest.raises(ConfigurationError, match="the server job 'train' needs a process of its own"):
        await played(train(), tmp_path, 2, 0, ignore)


PROCESSES = "the limit of processes is reached; raise it (ulimit -u, or pids.max of the container)"


@pytest.mark.parametrize(
    ("where", "name", "error", "why"),
    [
        (os, "fork", OSError(errno.EAGAIN, "Resource temporarily unavailable"), PROCESSES),
        (threading.Thread, "start", RuntimeError("can't start new thread"), PROCESSES),
        (os, "fork", OSError(errno.ENOMEM, "Cannot allocate memory"), "no memory is left; free some"),
        (
            os,
            "pipe",
            OSError(errno.EMFILE, "Too many open files"),
            "the limit of open files is reached; raise it (ulimit -n)",
        ),
    ],
)
async def test_a_job_for_which_the_system_has_no_process_left_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: object, name: str, error: Exception, why: str
):
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(where, name, refuse)
    with pytest.raises(FedemuError) as told:
        await played(train(), tmp_path, 3, 0, ignore)
    assert str(told.value) == (
        f"The process of the server job 'train' cannot be started in round 3: {why}, and go on with --resume."
    )


async def test_a_finished_job_is_not_run_again_unless_it_would_begin_from_something_else(tmp_path: Path):
    first = await played(train(), tmp_path, 1, 0, ignore, basis="two replies")

    def refuse(index: int) -> None:
        raise AssertionError("ran again")

    again = await played(train(refuse), tmp_path, 1, 0, ignore, basis="two replies")
    assert model_digest(again) == model_digest(first)
    for other in ({"basis": "two replies", "attempt": 1}, {"basis": "three replies"}):
        with pytest.raises(FedemuError, match="'train' failed: AssertionError: ran again"):
            await played(train(refuse), tmp_path, 1, 0, ignore, **other)


async def test_a_job_that_dies_twice_is_an_error_that_names_the_signal(tmp_path: Path):
    job = train(lambda index: os.kill(os.getpid(), signal.SIGKILL) if index == 8 else None)
    with pytest.raises(FedemuError, match=r"'train' of round 3 died 2 times, lastly by SIGKILL .the kernel does so"):
        await played(job, tmp_path, 3, 0, ignore)
    assert checkpoint.load_job(tmp_path, 3, 0).step == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
async def test_a_job_leaves_it_to_its_coordinator_to_heed_a_terminal(tmp_path: Path, number: signal.Signals):
    lives = tmp_path / "lives"

    def hook(index: int) -> None:
        if not index:
            lives.open("a").write("x")
        os.kill(os.getpid(), number)

    await played(train(hook), tmp_path, 1, 0, ignore)
    assert lives.read_text() == "x"


async def test_a_job_that_raises_is_not_tried_again(tmp_path: Path):
    tries = tmp_path / "tries"

    def hook(index: int) -> None:
        with open(tries, "a") as file:
            file.write("x")
        raise ValueError("the public data set is empty")

    with pytest.raises(FedemuError, match="'train' failed: ValueError: the public data set is empty") as told:
        await played(train(hook), tmp_path, 1, 0, ignore)
    assert told.value.exit_code != ConfigurationError.exit_code, "it is no mistake of the experiment's settings"
    assert tries.read_text() == "x"


async def test_what_a_job_says_last_is_heard_also_if_it_ends_just_after_a_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    class Before:
        """Polls. The first look comes before the process has written anything, and its end before the next."""

        def __init__(self):
            self._poll = select.poll()
            self.register = self._poll.register

        def poll(self, milliseconds: int):
            looks.append(milliseconds)
            if len(looks) > 1:
                return self._poll.poll(milliseconds)
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            return []

    def fail(index: int) -> None:
        raise ValueError("no public data")

    looks: list[int] = []
    died: list[str] = []
    monkeypatch.setattr(server_job, "select", SimpleNamespace(poll=Before, POLLIN=select.POLLIN))
    with pytest.raises(FedemuError, match="no public data"):
        await played(train(fail), tmp_path, 1, 0, ignore, died=died.append)
    assert died == []


@pytest.mark.parametrize(("device_type", "on_gpu"), [("auto", True), ("cpu", False)])
async def test_a_job_may_use_the_gpu_unless_the_processor_is_chosen(
    device_type: DeviceType, on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def step(carry, index):
        told = "NVIDIA_TF32_OVERRIDE" in os.environ  # it would change the bits of a GPU
        return {"on_gpu": torch.tensor(job_device().type == "cuda"), "told": torch.tensor(told)}, True

    asks_driver = "PYTORCH_NVML_BASED_CUDA_CHECK"
    monkeypatch.setenv(asks_driver, "")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    server_job_worker.leave_gpu_to_jobs()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: asks_driver not in os.environ)
    job = ServerJob("place", lambda: dict.fromkeys(("on_gpu", "told"), torch.tensor(False)), step, 1, 1)
    found = await played(job, tmp_path, 1, 0, ignore, device_type=device_type)
    assert (bool(found["on_gpu"]), bool(found["told"])) == (on_gpu, False)
    assert job_device().type == "cpu", "this process must not use the GPU"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 8 GiB."),
            "CUDA out of memory",
        ),
        (torch.AcceleratorError("CUDA error: out of memory\nErrors may be told late."), "CUDA error: out of memory"),
    ],
)
async def test_a_gpu_without_memory_is_told_with_what_takes_less(error: RuntimeError, told: str, tmp_path: Path):
    def fail(index: int) -> None:
        raise error

    said = (
        f"'train' failed: {told}. Trainers and server jobs share the memory of a GPU: a smaller local.stack "
        "leaves more of it to server jobs, and with --device-type cpu they need none"
    )
    with pytest.raises(ConfigurationError, match=f"{re.escape(said)}$"):
        await played(train(fail), tmp_path, 1, 0, ignore)


W = torch.zeros(1)


@pytest.mark.parametrize(
    ("init", "step", "said"),
    [
        ({"w": W, "v": W}, {"w": W, "v": W}, "its step must return two things, .* returned a dict"),
        (
            {"w": W},
            ({"w": 3.0}, True),
            "the first of the two things that its step returns must be a tree, .* not a float as 'w'",
        ),
        ({"w": W}, ([W], True), "the first of the two things that its step returns must be a tree, .* not a list"),
        (({"w": W}, True), None, "its init must return a tree, which has tensors by name, and not a tuple"),
        ({1: W}, None, "its init must return a tree, which has tensors by name, and not by 1"),
        ({"w": W.to_sparse()}, None, r"its init must .* not a sparse one as 'w'; to_dense\(\) makes it dense"),
        (
            {"model": {"w": W}},
            None,
            r"its init must .* not a dict as 'model'; flatten\(...\) makes one tree of trees by name",
        ),
    ],
)
async def test_a_job_that_makes_something_else_than_trees_is_an_error_that_says_so(
    tmp_path: Path, init: Any, step: Any, said: str
):
    job = ServerJob("train", lambda: init, lambda carry, index: step, 5, 1)
    with pytest.raises(ConfigurationError, match=f"'train' failed: {said}$"):
        await played(job, tmp_path, 1, 0, ignore)


async def test_progress_is_told_on_the_event_loop(tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_job_worker, "_REPORT_SECONDS", -1.0)
    told = []

    def progress(step: int) -> None:
        assert asyncio.get_running_loop() is loop
        told.append(step)

    loop = asyncio.get_running_loop()
    await played(train(), tmp_path, 1, 0, progress)
    await until(lambda: len(told) >= 13)
    assert told[:13] == [*range(1, 13), 12]


def endless(pid_file: Path) -> ServerJob:
    def hook(index: int) -> None:
        if not pid_file.exists():
            partial = pid_file.with_suffix(".partial")
            partial.write_text(str(os.getpid()))
            partial.rename(pid_file)
        time.sleep(0.001)

    return train(hook, steps=10**9)


async def test_cancelling_ends_the_process_and_keeps_the_checkpoint(tmp_path: Path, until: Until):
    pid_file = tmp_path / "pid"
    task = asyncio.create_task(played(endless(pid_file), tmp_path, 1, 0, ignore))
    await until(lambda: pid_file.exists() and checkpoint.load_job(tmp_path, 1, 0) is not None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(int(pid_file.read_text()))
    assert not checkpoint.load_job(tmp_path, 1, 0).finished


async def test_the_event_loop_goes_on_while_a_job_runs(tmp_path: Path, until: Until):
    pid_file = tmp_path / "pid"
    task = asyncio.create_task(played(endless(pid_file), tmp_path, 1, 0, ignore))
    await until(pid_file.exists)
    await asyncio.wait_for(asyncio.sleep(0), 5)
    assert not task.done()
    task.cancel()
    await asyncio.wait([task], timeout=30)
    assert task.cancelled()


def coordinate(directory: Path) -> None:
    asyncio.run(played(endless(directory / "pid"), directory, 1, 0, ignore))


async def test_a_job_dies_with_a_coordinator_that_is_killed(tmp_path: Path, until: Until):
    coordinator = multiprocessing.get_context("fork").Process(target=coordinate, args=(tmp_path,))
    coordinator.start()
    await until((tmp_path / "pid").exists)
    job = psutil.Process(int((tmp_path / "pid").read_text()))
    os.kill(coordinator.pid, signal.SIGKILL)
    coordinator.join(30)
    await until(lambda: ended(job))


def ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # It may end between the two looks.
        return True


async def test_a_job_holds_no_connection_of_the_coordinator(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.fileno()

        def step(carry, index):
            return {"socket": torch.tensor(stat.S_ISSOCK(os.fstat(number).st_mode))}, False

        job = ServerJob("look", lambda: {"socket": torch.tensor(True)}, step, 1, 1)
        assert not (await played(job, tmp_path, 1, 0, ignore))["socket"]
        assert stat.S_ISSOCK(os.fstat(number).st_mode)


async def test_a_job_computes_in_threads_after_the_coordinator_did(tmp_path: Path):
    before = torch.get_num_threads()
    large = torch.ones(2_000_000)
    torch.set_num_threads(3)
    try:
        large.exp().sum()

        def step(carry, index):
            return {"sum": large.mul(2).sum(), "threads": torch.tensor(torch.get_num_threads())}, False

        job = ServerJob("sum", dict, step, 1, 1)
        result = await asyncio.wait_for(played(job, tmp_path, 1, 0, ignore, threads=2), 60)
    finally:
        torch.set_num_threads(before)
    assert (result["sum"], result["threads"]) == (4_000_000, 2)
