"""Captured steps: the same bits as ordinary ones, how many there are, and when a step stays ordinary.

A processor has no CUDA graphs. What ``rehearse`` makes does a recorded work again each time, on the memory of the first
time. The tests with the mark ``gpu`` use real graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.graphs.captures import ORDINARY_STEPS, Captures, GraphRecorder
from fedemu.algorithms.interface import Model
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import Objective
from fedemu.algorithms.trees import flatten, map_leaves
from fedemu.device.compute.executors.arguments import Arguments
from fedemu.device.compute.executors.executor import Job, JobResult, Source
from fedemu.device.compute.executors.lowering import Lowered
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.ids import Digest

SHAPE = (1, 12, 12)
SIZES = (7, 23, 1, 12, 5)


def source_on(device: str) -> Source:
    random = np.random.default_rng(0)
    split = Split(random.integers(0, 256, (400, *SHAPE), np.uint8), random.integers(0, 4, 400), {})
    corpus = Corpus("noise", split, split, tuple("abcd"), SHAPE, np.array([127.5]), np.array([73.9]), Digest("0" * 64))
    return Source(corpus, seed=5, device=torch.device(device))


def local(model: Model, **settings: Any) -> LocalSGD:
    return LocalSGD(model, Objective(model), **{"epochs": 2, "batch_size": 5, "lr": 0.1, "momentum": 0.9, **settings})


def play(executor: Vmapped, program: LocalSGD, model: Model, device: str, rounds: int = 2) -> list[dict[str, Tensor]]:
    """The payloads and metrics of all devices in some rounds, each of which begins with another model."""
    source, found = source_on(device), []
    for round in range(1, rounds + 1):
        shared = {"model": map_leaves(lambda leaf: leaf.to(device), model.init(round))}
        jobs = [Job(i, round, 0, np.arange(11 * i, 11 * i + size)) for i, size in enumerate(SIZES)]
        for result in executor.run(program, shared, jobs, source):
            assert isinstance(result, JobResult), result
            metrics = {name: torch.tensor(value) for name, value in result.metrics.items()}
            found.append({**flatten(result.payload), **metrics})
    return found


def assert_same_bits(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(("model", "rounds"), [(mlp(SHAPE, 4, hidden=[16]), 2), (cnn(SHAPE, 4), 1)], ids=["mlp", "cnn"])
def test_a_captured_step_gives_the_same_bits(model: Model, rounds: int, rehearse: Any) -> None:
    program = local(model)
    recorder = rehearse()
    steps: list[int] = []

    def counted(lowered: Lowered, given: Arguments) -> Sequence[Tensor]:
        steps.append(id(lowered))
        return captures.run(lowered, given)

    captures = Captures(recorder)
    found = play(Vmapped(4, counted), program, model, "cpu", rounds)
    assert_same_bits(found, play(Vmapped(4), program, model, "cpu", rounds))
    assert (recorder.records, len(captures)) == (1, 1)
    assert len({*steps}) == 1
    assert recorder.replays == len(steps) - ORDINARY_STEPS > 5


def test_graphs_are_bounded_by_number_and_by_the_bytes_of_their_inputs(rehearse: Any) -> None:
    model = mlp(SHAPE, 4, hidden=[16])
    programs = [local(model, epochs=8, batch_size=size) for size in (5, 6, 7)]
    for limits, records, kept in (
        ({"most": 2}, 3, 2),
        ({"most_bytes": 1000}, 0, 0),
        ({"most_bytes": 150_000}, 3, 1),
    ):
        recorder = rehearse()
        captures = Captures(recorder, **limits)
        executor = Vmapped(4, captures.run)
        for program in programs:
            assert_same_bits(play(executor, program, model, "cpu", 1), play(Vmapped(4), program, model, "cpu", 1))
        assert (recorder.records, len(captures)) == (records, kept), limits


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"error": RuntimeError("operation not permitted when stream is capturing\nmore")}, "stream is capturing"),
        ({"error": torch.OutOfMemoryError("CUDA out of memory")}, "out of memory"),
        ({"wrong": 1e-7}, "other bits"),
    ],
    ids=["not capturable", "no memory", "other bits"],
)
def test_a_step_that_cannot_be_captured_stays_as_it_is(
    faults: dict[str, Any], said: str, rehearse: Any, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = rehearse(**faults)
    model = mlp(SHAPE, 4, hidden=[16])
    captures = Captures(recorder)
    with caplog.at_level(logging.WARNING):
        found = play(Vmapped(4, captures.run), local(model), model, "cpu")
    assert_same_bits(found, play(Vmapped(4), local(model), model, "cpu"))
    assert (recorder.records, len(captures)) == (1, 0), "it is tried once"
    assert [said in record.getMessage() for record in caplog.records] == [True]


def test_a_step_whose_operations_were_not_recorded_is_never_captured(rehearse: Any) -> None:
    recorder = rehearse()
    captures = Captures(recorder)

    def step(*leaves: Tensor) -> list[Tensor]:
        return [leaf + 1 for leaf in leaves]

    spec: Any = None
    lowered = Lowered(step, spec, draws=False, untraced=step, recorded=False)
    given = Arguments((), (), (), (), (), carry=[torch.zeros(2)])
    for _ in range(2 * ORDINARY_STEPS):
        given = given._replace(carry=captures.run(lowered, given))
    assert given.carry[0].tolist() == [2 * ORDINARY_STEPS] * 2
    assert recorder.records == 0


def test_a_carry_that_moves_between_its_places_is_not_written_over_before_it_is_read(rehearse: Any) -> None:
    def swap(first: Tensor, second: Tensor) -> list[Tensor]:
        return [second, first, first[0], second]

    spec: Any = None
    lowered = Lowered(swap, spec, draws=False, untraced=swap, recorded=True)
    captures = Captures(rehearse())
    given = Arguments((), (), (), (), (), carry=[torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])
    for step in range(ORDINARY_STEPS + 5):
        before = [leaf.tolist() for leaf in given.carry]
        outputs = captures.run(lowered, given)
        after = [leaf.tolist() for leaf in outputs]
        assert after == [before[1], before[0], before[0][0], before[1]], step
        given = given._replace(carry=outputs[:2])
    assert len(captures) == 1


class Gpu:
    """What torch's own context of a capture does on a GPU: its streams, and the pools for which its allocator captures.

    A capture in which ``synchronise`` was called fails at its end. Where torch is ``older``, its allocator does not
    hear of that.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, older: bool) -> None:
        self.current, self.waits, self.underway = "first", list[tuple[str, str]](), list[int]()
        self.invalid = False
        names, pools = iter(("second", "third")), iter((1, 2))
        gpu = self

        class Stream:
            def __init__(self, name: str = "") -> None:
                self.name = name or next(names)

            def wait_stream(self, other: Stream) -> None:
                gpu.waits.append((self.name, other.name))

        class Entered:
            def __init__(self, stream: Stream) -> None:
                self.before, self.stream = gpu.current, stream

            def __enter__(self) -> None:
                gpu.current = self.stream.name

            def __exit__(self, *error: object) -> None:
                gpu.current = self.before

        class Graph:
            def capture_begin(self, pool: int, **_: object) -> None:
                if pool in gpu.underway:
                    raise RuntimeError("already recording")
                gpu.underway.append(pool)
                self.pool, gpu.invalid = pool, False

            def capture_end(self) -> None:
                if not (older and gpu.invalid):
                    gpu.end(0, self.pool)
                if gpu.invalid:
                    raise RuntimeError("a previous error")

            def replay(self) -> None: ...

        for name, stand_in in {
            "Stream": Stream,
            "stream": Entered,
            "current_stream": lambda: Stream(gpu.current),
            "current_device": lambda: 0,
            "set_stream": lambda stream: setattr(gpu, "current", stream.name),
            "CUDAGraph": Graph,
            "graph_pool_handle": lambda: next(pools),
            "synchronize": lambda: None,
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end)

    def end(self, device: int, pool: int) -> None:
        if pool not in self.underway:
            raise RuntimeError("not currently recording")
        self.underway.remove(pool)

    def synchronise(self) -> list[Tensor]:
        if self.underway:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")
        return [torch.ones(1)]


@pytest.mark.parametrize("older", [False, True])
def test_after_a_capture_that_failed_the_next_step_is_captured(older: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, recorder, made = Gpu(monkeypatch, older), GraphRecorder(), [torch.ones(1)]
    with pytest.raises(RuntimeError, match="a previous error"):
        recorder.record(gpu.synchronise)
    assert (gpu.current, gpu.underway) == ("first", [])
    assert recorder.record(lambda: made)[0] is made
    assert (gpu.current, gpu.underway) == ("first", [])
    assert gpu.waits == [("second", "first"), ("first", "second"), ("third", "first"), ("first", "third")]


def test_what_a_step_that_fails_has_launched_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> list[Tensor]:
        raise RuntimeError("out of memory")

    gpu = Gpu(monkeypatch, older=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        GraphRecorder().record(fails)
    assert gpu.waits == [("second", "first"), ("first", "second")]
    assert gpu.current == "first"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: mlp(SHAPE, 4, hidden=[16]), marks=pytest.mark.gpu, id="mlp"),
        pytest.param(lambda: cnn(SHAPE, 4), marks=pytest.mark.gpu, id="cnn"),
    ],
)
def test_a_cuda_graph_gives_the_same_bits(make: Callable[[], Model]) -> None:
    model = make()
    captures = Captures(GraphRecorder())
    found = play(Vmapped(4, captures.run), local(model), model, "cuda")
    assert_same_bits(found, play(Vmapped(4), local(model), model, "cuda"))
    assert len(captures) == 1, "the step was captured, and gave its own bits"


@pytest.mark.gpu
def test_a_step_that_synchronises_does_not_keep_the_next_one_from_being_captured() -> None:
    recorder, stream = GraphRecorder(), torch.cuda.current_stream()
    place = torch.zeros(3, device="cuda")
    with pytest.raises(RuntimeError):
        recorder.record(lambda: [place * float(place.sum())])
    assert torch.cuda.current_stream() == stream
    (found,), replay = recorder.record(lambda: [place + 1])
    assert torch.cuda.current_stream() == stream
    for value in (4.0, 7.0):
        place.fill_(value)
        replay()
        assert found.tolist() == [value + 1] * 3
