"""A trainer's decoding and encoding: what a program gets of a job, and what goes back to the device."""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import asdict

from fedemu.algorithms.interface import Forest
from fedemu.algorithms.replay.buffer import Buffer
from fedemu.device.bus import Done, JobFailed, SharedFile, Train, TrainJob
from fedemu.device.compute.executors.executor import Job, JobResult, failed
from fedemu.device.compute.process import TorchRunner
from fedemu.device.memory.replay_buffer import split_own
from fedemu.device.memory.store import read_own, write_own
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.errors import FedemuError, MachineFault, TrainingError
from fedemu.protocol.host.sealed import place_of
from fedemu.protocol.messages import TensorSpec
from fedemu.protocol.tensors import unpack

ADVICE = " (a smaller local.stack or local.batch_size takes less memory)"


class Recorder:
    """A trainer that records its jobs and answers as the test wants."""

    def __init__(self, answer: Callable[[Job], JobResult | TrainingError], most: int | None = None) -> None:
        self.most = most
        self.programs = {"train": None, "ask": None}
        self.calls: list[tuple[str, Forest, list[Job]]] = []
        self._answer = answer

    sample_bytes = 12

    def capacity(self, program: str) -> int:
        return {"train": 16, "ask": 2}[program]

    def at_once(self, program: str) -> int | None:
        return self.most

    def warm_up(self) -> None: ...

    def run(self, program: str, shared: Forest, jobs: Sequence[Job]) -> list[JobResult | TrainingError]:
        self.calls.append((program, shared, list(jobs)))
        return [self._answer(job) for job in jobs]


def a_result(job: Job, own: dict[str, torch.Tensor] | None = None) -> JobResult:
    payload = {"model": {"w": torch.full((2,), float(job.device))}}
    return JobResult(payload, own or {}, len(job.indices), 3, {"loss": 0.25}, (1, 2))


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., tuple[Train, list[memoryview]]]:
    """Groups of jobs with samples (device, device + 1, …), two or ``sizes``, each with an own part ``c`` = device."""
    store = BlobStore(tmp_path / "blobs")
    digest = store.put(encode_tree({"w": np.array([1.0, 2.0], np.float32)}))

    def make(
        *devices: int,
        own: str | None = None,
        budget: int = 0,
        sealed: Mapping[int, Sequence[int]] = MappingProxyType({}),
        sizes: Sequence[int] = (),
    ) -> tuple[Train, list[memoryview]]:
        specs, frames = [], []
        for device, size in zip(devices, sizes or [2] * len(devices), strict=True):
            specs.append(TensorSpec(name=f"{device}/.", dtype="int64", shape=(size,)))
            specs.append(TensorSpec(name=f"{device}/c", dtype="float32", shape=(1,)))
            frames.append(memoryview(np.arange(device, device + size).tobytes()))
            for period, indices in sealed.items():
                specs.insert(-1, TensorSpec(name=f"{device}/.sealed.{period}", dtype="int64", shape=(len(indices),)))
                frames.append(memoryview(np.array(indices, np.int64).tobytes()))
            frames.append(memoryview(np.array([device], np.float32).tobytes()))
        message = Train(
            group=1,
            ask="4.0.1",
            program="train",
            task=2,
            shared=(SharedFile(key="model", digest=digest, path=str(store.path(digest))),),
            jobs=tuple(
                TrainJob(
                    device=device,
                    own=str(tmp_path / str(device) / own) if own else None,
                    next_own=str(tmp_path / str(device) / "next"),
                    budget=budget,
                    tensors=2 + len(sealed),
                )
                for device in devices
            ),
            tensors=tuple(specs),
        )
        return message, frames

    return make


def test_a_program_gets_shared_trees_samples_own_part_and_own_state(train: Any, tmp_path: Path) -> None:
    write_own(tmp_path / "5" / "mine", {"m": np.array([7.0])})
    recorder = Recorder(a_result)
    list(TorchRunner(recorder).run(*train(3, 5, own="mine")))
    ((program, shared, jobs),) = recorder.calls
    assert program == "train"
    assert shared["model"]["w"].tolist() == [1.0, 2.0]
    assert [(job.device, job.round, job.task, job.indices.tolist()) for job in jobs] == [
        (3, 4, 2, [3, 4]),
        (5, 4, 2, [5, 6]),
    ]
    assert [job.each["c"].tolist() for job in jobs] == [[3.0], [5.0]]
    assert jobs[0].own is None
    assert jobs[1].own is not None
    assert jobs[1].own["m"].tolist() == [7.0]


def test_a_result_carries_payload_counts_and_metrics(train: Any) -> None:
    ((done, frames),) = TorchRunner(Recorder(a_result), iter([10.0, 10.5]).__next__).run(*train(3))
    assert isinstance(done, Done)
    assert asdict(done) | {"tensors": ()} == {
        "v": 1, "tensors": (),
        "device": 3, "ask": "4.0.1", "examples": 2, "steps": 3, "metrics": {"loss": 0.25}, "label_counts": (1, 2),
        "seconds": 0.5, "wrote_own": False, "buffered": None, "buffered_bytes": None,
    }  # fmt: skip
    assert unpack(done.tensors, frames)["model/w"].tolist() == [3.0, 3.0]


def test_the_time_of_a_group_is_shared_among_the_jobs_that_were_run(train: Any, tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "mine").write_bytes(b"garbage")
    runner = TorchRunner(Recorder(a_result), iter([10.0, 13.0]).__next__)
    answers = [answer for answer, _ in runner.run(*train(3, 5, 8, own="mine"))]
    assert {answer.device: answer.seconds for answer in answers if isinstance(answer, Done)} == {3: 1.5, 8: 1.5}


def test_a_call_is_computed_while_the_results_of_the_one_before_are_encoded(train: Any, tmp_path: Path) -> None:
    own = {"m": torch.tensor([9.0])}
    order = iter([3, 5, 8, 1, 2])
    encoded_before: list[bool] = []

    def answer(job: Job) -> JobResult:
        assert job.device == next(order)
        if job.device == 8:  # the first of the second call
            deadline = time.monotonic() + 20
            while not (tmp_path / "5" / "next").exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            encoded_before.append((tmp_path / "5" / "next").exists())
        return replace(a_result(job, own), payload={"model": {"w": torch.full((20_000,), float(job.device))}})

    answers = TorchRunner(Recorder(answer, most=2)).run(*train(3, 5, 8, 1, 2))
    told = {done.device: (done, frames) for done, frames in answers if isinstance(done, Done)}
    assert encoded_before == [True]
    assert list(told) == [3, 5, 8, 1, 2]
    for device, (done, frames) in told.items():
        assert unpack(done.tensors, frames)["model/w"].tolist() == [float(device)] * 20_000
        assert place_of(frames[0]) is not None, "sending would have to copy it"
        assert read_own(tmp_path / str(device) / "next")["m"].tolist() == [9.0]


def test_jobs_with_as_many_samples_are_computed_together(train: Any) -> None:
    recorder = Recorder(a_result, most=2)
    devices = [answer.device for answer, _ in TorchRunner(recorder).run(*train(1, 2, 3, 4, sizes=(2, 9, 1, 8)))]
    assert [[job.device for job in jobs] for _, _, jobs in recorder.calls] == [[2, 4], [1, 3]]
    assert devices == [2, 4, 1, 3]


def test_a_disk_that_is_full_while_another_call_is_computed_ends_the_work(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    runner = TorchRunner(Recorder(lambda job: a_result(job, own={"memory": torch.ones(20_000)}), most=1))
    with pytest.raises(FedemuError, match=r"cannot be written: the disk is full; make room there$"):
        list(runner.run(*train(3, 5)))


def test_the_next_own_state_is_in_place_before_the_result_is_told(train: Any, tmp_path: Path) -> None:
    own = {"m": torch.tensor([9.0])}
    ((done, _),) = TorchRunner(Recorder(lambda job: a_result(job, own))).run(*train(3))
    assert isinstance(done, Done)
    assert done.wrote_own
    assert read_own(tmp_path / "3" / "next")["m"].tolist() == [9.0]


def test_bfloat16_in_the_own_state_and_in_the_buffer_comes_back_to_the_program(train: Any) -> None:
    half = torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16)
    buffer = Buffer(np.array([4, 9]), np.array([0, 0]), 1, 2, answered={"a": half}, notes={"n": half})
    recorder = Recorder(lambda job: replace(a_result(job, {"m": half}), buffer=buffer))
    list(TorchRunner(recorder).run(*train(3, budget=2)))
    list(TorchRunner(recorder).run(*train(3, own="next", budget=2)))
    [job] = recorder.calls[-1][2]
    assert job.own is not None
    assert job.buffer is not None
    for leaf in (job.own["m"], job.buffer.answered["a"], job.buffer.notes["n"]):
        assert leaf.dtype == torch.bfloat16
        assert torch.equal(leaf, half)


def test_an_own_state_that_is_gone_fails_the_job_instead_of_starting_over(train: Any) -> None:
    own = {"m": torch.tensor([9.0])}
    ((failed, _),) = TorchRunner(Recorder(lambda job: a_result(job, own))).run(*train(3, own="gone"))
    assert isinstance(failed, JobFailed)
    assert failed.reason == "own_state"


def test_an_own_state_that_cannot_be_read_fails_only_its_job(train: Any, tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "mine").write_bytes(b"garbage")
    answers = [answer for answer, _ in TorchRunner(Recorder(a_result)).run(*train(3, 5, own="mine"))]
    assert sorted((answer.device, type(answer)) for answer in answers) == [(3, Done), (5, JobFailed)]


@pytest.mark.parametrize("file", ["mine", "blobs"])
def test_a_machine_without_open_files_ends_the_trainer_and_fails_no_device(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    write_own(tmp_path / "3" / "mine", {"m": np.ones(2, np.float32)})
    ordinary = io.open

    def refuse(path: Any, *more: Any, **named: Any) -> Any:
        if file in str(path):
            raise OSError(errno.EMFILE, "Too many open files")
        return ordinary(path, *more, **named)

    for module in (io, builtins):
        monkeypatch.setattr(module, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        list(TorchRunner(Recorder(a_result)).run(*train(3, own="mine")))


def test_an_own_state_without_a_whole_buffer_fails_only_its_job(train: Any, tmp_path: Path) -> None:
    write_own(tmp_path / "5" / "mine", {".replay.indices": np.arange(2)})
    answers = [answer for answer, _ in TorchRunner(Recorder(a_result)).run(*train(3, 5, own="mine", budget=4))]
    assert sorted((answer.device, type(answer)) for answer in answers) == [(3, Done), (5, JobFailed)]


@pytest.mark.parametrize("refused", ["mkdir", "replace"])
def test_a_full_disk_ends_the_work_of_the_trainer_with_its_name(
    train: Any, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, refused, full)
    runner = TorchRunner(Recorder(lambda job: a_result(job, own={"memory": torch.ones(2)})))
    with pytest.raises(FedemuError, match=r"cannot be written: the disk is full; make room there$"):
        list(runner.run(*train(3, 5)))


def test_a_damaged_blob_fails_the_jobs_that_need_it(train: Any, tmp_path: Path) -> None:
    [blob] = (tmp_path / "blobs").iterdir()
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes().replace(b"F32", b"I32"))
    answers = [answer for answer, _ in TorchRunner(Recorder(a_result)).run(*train(3, 5))]
    assert [(answer.device, answer.reason) for answer in answers] == [(3, "blob"), (5, "blob")]
    assert "is damaged: its checksum is wrong" in answers[0].detail


def test_a_job_with_more_measures_than_a_reply_holds_fails_and_says_so(train: Any) -> None:
    many = {f"class {label}": 0.5 for label in range(65)}
    [(answer, _)] = TorchRunner(Recorder(lambda job: replace(a_result(job), metrics=many))).run(*train(3))
    detail = "the program 'train' tells 65 measures, and a reply holds 64; tell fewer"
    assert answer == JobFailed(device=3, ask="4.0.1", reason="training", detail=detail)


def test_a_failing_program_is_the_failure_of_its_device_alone(train: Any) -> None:
    recorder = Recorder(lambda job: TrainingError("no samples") if job.device == 5 else a_result(job))
    first, second = (answer for answer, _ in TorchRunner(recorder).run(*train(3, 5)))
    assert isinstance(first, Done)
    assert second == JobFailed(device=5, ask="4.0.1", reason="training", detail="no samples")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (MemoryError(), ADVICE),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), ADVICE),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory"), ADVICE),
        (RuntimeError("CUDA out of memory in a kernel"), ADVICE),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ADVICE),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ""),
    ],
)
def test_a_machine_that_fails_ends_the_trainer_and_fails_no_device(train: Any, error: Exception, advice: str) -> None:
    def crash(job: Job) -> JobResult:
        raise failed(job.device, "the program failed", error)

    with pytest.raises(MachineFault, match=f"device 3: the program failed{re.escape(advice)}: "):
        list(TorchRunner(Recorder(crash)).run(*train(3, 5)))


def test_a_bug_in_a_program_fails_the_jobs_and_not_the_trainer(train: Any) -> None:
    def crash(job: Job) -> JobResult:
        raise ZeroDivisionError("by zero")

    answers = [answer for answer, _ in TorchRunner(Recorder(crash)).run(*train(3, 5))]
    assert [(answer.device, answer.detail) for answer in answers if isinstance(answer, JobFailed)] == [
        (3, "ZeroDivisionError: by zero"),
        (5, "ZeroDivisionError: by zero"),
    ]


def test_bfloat16_keeps_its_name_on_the_bus(train: Any) -> None:
    half = {"w": torch.ones(2, dtype=torch.bfloat16)}
    recorder = Recorder(lambda job: JobResult({"model": half}, half, 1, 1, {}, None))
    ((done, frames),) = TorchRunner(recorder).run(*train(3))
    assert isinstance(done, Done)
    assert [(spec.name, spec.dtype) for spec in done.tensors] == [("model/w", "bfloat16")]
    assert frames[0].nbytes == 4


def test_shared_trees_are_decoded_once_per_blob(train: Any) -> None:
    recorder = Recorder(a_result)
    runner = TorchRunner(recorder)
    for _ in range(2):
        list(runner.run(*train(3)))
    first, second = (shared["model"] for _, shared, _ in recorder.calls)
    assert first is second


def test_capacities_are_told_by_program() -> None:
    assert TorchRunner(Recorder(a_result)).capacity == {"train": 16, "ask": 2}


def test_a_buffer_is_part_of_the_own_state_beside_what_the_program_keeps(train: Any, tmp_path: Path) -> None:
    first = Buffer(np.array([3, 8]), np.array([0, 1]), period=2, seen=9, asked=4, answered={"x": torch.tensor([0.5])})

    def remember(job: Job) -> JobResult:
        return JobResult({}, {"m": torch.tensor([9.0])}, 2, 0, {}, None, buffer=first)

    ((done, _),) = TorchRunner(Recorder(remember)).run(*train(3, budget=5))
    assert (done.wrote_own, done.buffered, done.buffered_bytes) == (True, 2, 24)
    program, _ = split_own(read_own(tmp_path / "3" / "next"))
    assert {name: leaf.tolist() for name, leaf in program.items()} == {"m": [9.0]}
    recorder = Recorder(a_result)
    list(TorchRunner(recorder).run(*train(3, own="next", budget=5, sealed={0: [4], 1: []})))
    ((_, _, (job,)),) = recorder.calls
    assert job.own is not None
    assert {name: leaf.tolist() for name, leaf in job.own.items()} == {"m": [9.0]}
    assert job.buffer is not None
    assert (job.buffer.indices.tolist(), job.buffer.periods.tolist()) == ([3, 8], [0, 1])
    assert (job.buffer.period, job.buffer.seen, job.buffer.asked) == (2, 9, 4)
    assert job.buffer.answered["x"].tolist() == [0.5]
    assert {period: indices.tolist() for period, indices in job.sealed.items()} == {0: [4], 1: []}
    assert job.each["c"].tolist() == [3.0]


def test_a_device_without_a_version_starts_with_an_empty_buffer(train: Any) -> None:
    recorder = Recorder(a_result)
    list(TorchRunner(recorder).run(*train(3, budget=5)))
    ((_, _, (job,)),) = recorder.calls
    assert job.buffer is not None
    assert (len(job.buffer), job.buffer.period, job.own) == (0, 0, None)
