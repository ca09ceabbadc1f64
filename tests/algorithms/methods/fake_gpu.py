"""Plays every method once, and then each of its programs on a GPU that only pretends to be there.

Run as ``python fake_gpu.py METHOD...``, it prints what it found as JSON: complaints by method, and what
``fake_gpu_with_values.py`` found of server jobs. Under ``FakeTensorMode``
tensors have shapes, dtypes and devices and no values, so this needs no GPU. torch without CUDA cannot differentiate
tensors that are called ``cuda``; a backend in Python, which is called ``gpu`` here, takes their place. It has to have a
process of its own, because from then on torch starts a thread for the GPU, and processes with threads must not fork.
"""

from __future__ import annotations

import json
import os
import sys
import unittest.mock
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import conftest  # noqa: E402
import fake_gpu_with_values as with_values  # noqa: E402
import test_every_method as every  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend  # noqa: E402

from fedemu.algorithms.interface import Forest, LocalProgram, Tree  # noqa: E402
from fedemu.algorithms.models.randomness.draws import KEY_SHAPE  # noqa: E402
from fedemu.algorithms.training.adam import Adam  # noqa: E402
from fedemu.device.compute.executors import lowering  # noqa: E402
from fedemu.device.compute.executors.arguments import Arguments, Names  # noqa: E402
from fedemu.device.compute.executors.cohort import cohorts, notes_of  # noqa: E402
from fedemu.device.compute.executors.executor import Job, JobResult, Source  # noqa: E402
from fedemu.device.compute.executors.serial import Serial  # noqa: E402
from fedemu.device.compute.tapes.recording import CONSTANT_BYTES  # noqa: E402
from fedemu.protocol.errors import TrainingError  # noqa: E402

GPU = "gpu"
STACK = 2
MIXED = "one that mixes"
BEGIN = Adam.begin


class Crossings(TorchDispatchMode):
    """Notes every copy from the GPU, for which a step would have to wait, and every large copy to it.

    A small constant may be copied to the GPU: the executors keep what they recorded of it, and copy it once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors((args, kwargs)))
        if given and func is torch.ops.aten._to_copy.default and not isinstance(given[0], FakeTensor):
            result = torch.zeros(given[0].shape, dtype=given[0].dtype, device=kwargs.get("device") or given[0].device)
        else:
            result = func(*args, **kwargs)
        before, after = ({tensor.device.type for tensor in some} for some in (given, tensors(result)))
        if GPU in before and after - {GPU}:
            self.found.append(f"{func} copies from the GPU")
        elif before and GPU in after - before and sum(tensor.nbytes for tensor in given) > CONSTANT_BYTES:
            self.found.append(f"{func} copies to the GPU at every step")
        return result


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors(each)


class Pretending:
    """An executor that computes by ``Serial``, and then runs each program once on the pretended GPU.

    It runs in a stack, where whatever fails one by one fails, too. Lowering does other things for a single device, so
    the first program of each class also runs one by one.
    """

    capacity = 1
    one_by_one: ClassVar[set[type]] = set()
    """The classes of the programs that have run one by one."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._serial = Serial(plain=True)
        self._seen: dict[int, LocalProgram] = {}

    def run(
        self, program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source
    ) -> list[JobResult | TrainingError]:
        results = self._serial.run(program, shared, jobs, source)
        if id(program) not in self._seen:
            self._seen[id(program)] = program
            ways = (STACK,) if type(program) in self.one_by_one else (None, STACK)
            self.one_by_one.add(type(program))
            for stack in ways:
                self._pretend(program, shared, [job for job in jobs if job.indices.size][:1], source, stack)
        return results

    def _pretend(
        self, program: LocalProgram, shared: Forest, jobs: Sequence[Job], source: Source, stack: int | None
    ) -> None:
        what = "begin"
        try:
            [cohort] = cohorts(program, shared, jobs, source, size=1)
            names = Names.of(shared, cohort.each, cohort.own, program)
            with FakeTensorMode(allow_non_fake_inputs=True), recorded(), torch.inference_mode(False):
                lead = () if stack is None else (stack,)

                def fake(*shape: int, like: Tensor | None = None) -> Tensor:
                    dtype = torch.float32 if like is None else like.dtype
                    return torch.zeros((*lead, *shape), dtype=dtype, device=GPU)

                def per_device(leaf: Tensor) -> Tensor:
                    return fake(*leaf.shape[1:], like=leaf)

                given = Arguments(
                    shared=[
                        torch.zeros(leaf.shape, dtype=leaf.dtype, device=GPU)
                        for tree in shared.values()
                        for leaf in tree.values()
                    ],
                    each=[per_device(leaf) for leaf in cohort.each.values()],
                    own=[per_device(leaf) for leaf in cohort.own.values()],
                    facts=[per_device(leaf) for leaf in cohort.facts],
                    key=[torch.zeros((*lead, *KEY_SHAPE), dtype=torch.int32, device=GPU)],
                )
                lowered_by = lowering.Lowering(stack)
                crossings = Crossings()
                with crossings:
                    lowered = lowered_by.begin(program, names, given)
                    carry, spec = result_of(lowered), lowered.spec
                    for number in range(len(program.stages)):
                        what, size = f"stage {number}", cohort.stages[number].rows.shape[1]
                        given = given._replace(
                            batch=[
                                fake(size, *cohort.x.shape[1:], like=cohort.x),
                                fake(size, like=cohort.y),
                                fake(size),
                                *(fake(size, *shape) for shape in notes_of(program).values()),
                            ],
                            noise=[fake(*program.noise[name]) for name in names.noise],
                            carry=carry,
                        )
                        carry = result_of(lowered_by.step(program, number, names, spec, given))[: len(carry)]
                    what = "finish"
                    last = given._replace(batch=(), noise=(), carry=carry)
                    outputs = result_of(lowered_by.finish(program, names, spec, last))
                elsewhere = {str(leaf.device) for leaf in outputs if leaf.device.type != GPU}
            found = [*dict.fromkeys(crossings.found), *(f"the result lies on {device}" for device in elsewhere)]
        except Exception as error:
            found = [f"{what}: {type(error).__name__}: {str(error).splitlines()[0]}"]
        kind = "stacked" if stack else "one by one"
        self.complaints += [f"{type(program).__name__}, {kind}: {each}" for each in found]


_LAST: list[Any] = []


def result_of(lowered: Any) -> list[Tensor]:
    return list(_LAST[-1])


@contextmanager
def recorded() -> Iterator[None]:
    """In place of recording, run a function once and keep what it returns."""
    ordinary = lowering.trace

    def once(function: Any, inputs: Sequence[Tensor], **how: int) -> Any:
        with torch.no_grad():
            _LAST.append(function(*inputs))
        return function

    lowering.trace = once
    try:
        yield
    finally:
        lowering.trace = ordinary


def complaints_of(name: str) -> list[str]:
    """Play two rounds of a method, on a stream of two tasks, and look at all of its programs.

    The method ``MIXED`` is one whose memory of gradients lies in host memory, which its first round shows.
    """
    with unittest.mock.patch.object(Adam, "begin", begin_in_host_memory if name == MIXED else Adam.begin):
        return _complaints_of("fedcil", rounds=1) if name == MIXED else _complaints_of(name, rounds=2)


def begin_in_host_memory(adam: Adam, trained: Tree) -> Tree:
    return {**BEGIN(adam, trained), "steps": torch.zeros((), dtype=torch.float64)}


def _complaints_of(name: str, rounds: int) -> list[str]:
    corpus = conftest.noisy_corpus()
    split = every.replace(corpus.train, x=every.np.ascontiguousarray(corpus.train.x[:, :, 2:10, 2:10]))
    corpus = every.replace(corpus, train=split, test=split, input_shape=every.SHAPE)
    parts = [every.Labelled(*corpus.batch(split, every.np.arange(start, start + 40))) for start in (300, 340)]
    executor = Pretending()
    fleet = conftest.LittleFleet(
        every.build(name, True),
        corpus,
        every.SHARES,
        every.model_of(True).init(0),
        stream=every.STREAM,
        public=every.PublicData(*parts),
        executor=executor,
        rounds_per_period=1,
    )
    for _ in range(rounds):
        fleet.play([0])
    return executor.complaints


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(GPU)
    # They come first: for the jobs, functions of fedemu are replaced.
    programs = {name: complaints_of(name) for name in sys.argv[1:]}
    json.dump({"programs": programs, "jobs": with_values.found(sys.argv[1:])}, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # torch's thread for the GPU calls Python, and must not while Python ends
