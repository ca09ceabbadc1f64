"""Plays the server jobs of every method on a processor, and on a GPU that only pretends to be there.

``found`` tells what it found by method: complaints, the jobs that were computed in both ways, and how often a captured
iteration was done. Tensors on the pretended GPU have
values, which the processor computes, so a job must end with the same bits. As on a real GPU, an operation may not mix
devices, unless a tensor of the processor has no dimensions, and what is captured may not wait for the GPU or copy
between devices. What is captured is a list of operations: a number of Python, or of a tensor of the processor, stays as
it was. ``fake_gpu.py`` calls this, and tells why it has a process of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import conftest  # noqa: E402
import test_every_method as every  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_map  # noqa: E402

from fedemu.algorithms.graphs import captures  # noqa: E402
from fedemu.algorithms.graphs.repeated import recorded_by  # noqa: E402
from fedemu.algorithms.interface import ServerJob, Tree  # noqa: E402
from fedemu.algorithms.methods import flashback  # noqa: E402
from fedemu.algorithms.training import job_device  # noqa: E402

GPU = "gpu"
PASSES: dict[str, Any] = {"server_epochs": 5}
GENERATING: dict[str, Any] = {"iterations": 5}
ITERATIONS: dict[str, dict[str, Any]] = {
    **{name: {**every.LONGER, "synthesis_rounds": 2} for name in every.LONGER_JOBS},
    **dict.fromkeys(("central", "fedavg_finetuned", "flashback"), PASSES),
    **dict.fromkeys(("mfcl", "fedavg_gen"), GENERATING),
    "fedcil": {"server_iterations": 5},
}
"""So many iterations that the second one is captured and others are done by what was captured."""
MIXED = "one that mixes"


class OnGPU(Tensor):
    """A tensor that says it is on the GPU. ``raw`` has its values, in host memory."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnGPU:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=torch.device(GPU, 0)
        )
        made.raw = raw
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Factories(TorchDispatchMode):
    """Makes tensors on the GPU where a function is given no tensor that is there."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Literals(TorchFunctionMode):
    """Copies what ``torch.tensor`` makes to the GPU: torch itself makes it there, where no Python is asked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.pop("device", None) if func is torch.tensor else None
        made = func(*args, **kwargs)
        return made if device is None else made.to(device)


MADE = 0
"""The number of tensors that were made on the GPU."""
WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::is_nonzero")
"""Operations for which a process waits until the GPU has the values."""


class Rehearsal:
    """A recorder of operations, which are done again each time, on the memory of the first time."""

    recording: list[tuple[Any, Any, Any, list[Tensor]]] | None = None
    """The operations so far: function, arguments and results. None while nothing is recorded."""
    replays = 0

    def record(self, work: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], object]]:
        operations = Rehearsal.recording = []
        try:
            outputs = work()
        finally:
            Rehearsal.recording = None

        @torch.no_grad()
        def replay() -> None:
            Rehearsal.replays += 1
            for func, args, kwargs, kept in operations:
                for old, new in zip(kept, tensors(func(*args, **kwargs)), strict=True):
                    if old.data_ptr() != new.data_ptr():  # it is no view, and was not written in place
                        old.copy_(new)

        return outputs, replay


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def on_raw(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """The function of a tensor's memory, which is that of ``raw``."""
    return lambda tensor: function(tensor.raw if isinstance(tensor, OnGPU) else tensor)


class Warned(logging.Handler):
    """What the captures warn of."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the function gives, with its values from the processor. Raises RuntimeError if it mixes devices."""
    global MADE
    given = tensors((args, kwargs))
    there = any(isinstance(leaf, OnGPU) for leaf in given)
    copies = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if there and not copies and any(leaf.dim() and not isinstance(leaf, OnGPU) for leaf in given):
        raise RuntimeError(f"{func} mixes devices")
    if Rehearsal.recording is not None:
        masks = func is torch.ops.aten.index.Tensor and any(leaf.dtype == torch.bool for leaf in given[1:])
        if masks or func._schema.name in WAITS or (copies and len({type(leaf) for leaf in given}) > 1):
            raise RuntimeError(f"{func} cannot be captured")
    device = kwargs.get("device")
    wanted = there if device is None else torch.device(device).type == GPU
    plain = {**kwargs, **({} if device is None else {"device": torch.device("cpu")})}
    raw_args, raw_kwargs = tree_map(lambda leaf: leaf.raw if isinstance(leaf, OnGPU) else leaf, (args, plain))
    made = func(*raw_args, **raw_kwargs)
    if Rehearsal.recording is not None and (there or wanted):
        numbers = {id(leaf): leaf.clone() for leaf in given if not isinstance(leaf, OnGPU)}
        constant = tree_map(lambda leaf: numbers.get(id(leaf), leaf), (raw_args, raw_kwargs))
        Rehearsal.recording.append((func, *constant, tensors(made)))
    if func._schema.name.endswith("_") and isinstance(args[0], OnGPU):
        return args[0]
    if Rehearsal.recording is not None and given and copies and there != wanted:
        raise RuntimeError(f"{func} cannot be captured: it copies between devices")
    if not wanted:
        return made
    MADE += 1
    return tree_map(lambda leaf: OnGPU(leaf) if isinstance(leaf, Tensor) else leaf, made)


def result_of(job: ServerJob) -> Tree:
    carry = job.init()
    for index in range(job.steps):
        carry, finished = job.step(carry, index)
        if finished:
            break
    return carry


class Playing(conftest.LittleFleet):
    """A fleet whose server jobs are computed in both ways."""

    complaints: list[str]

    def _compute(self, job: ServerJob) -> Tree:
        expected = result_of(job)
        before = MADE
        warned = Warned()
        captures.log.addHandler(warned)
        try:
            with (
                job_device.jobs_compute_on(lambda: torch.device(GPU)),
                recorded_by(lambda device: Rehearsal() if device.type == GPU else None),
                Factories(),
                Literals(),
            ):
                found = result_of(job)
        except Exception as error:
            self.complaints.append(f"{job.name}: {type(error).__name__}: {str(error).splitlines()[0]}")
            return expected
        finally:
            captures.log.removeHandler(warned)
        self.complaints += [f"{job.name}: {said}" for said in warned.found]
        if before == MADE:
            self.complaints.append(f"{job.name} computes nothing on the GPU")
        values = {name: leaf.raw if isinstance(leaf, OnGPU) else leaf for name, leaf in found.items()}
        differ = [name for name, leaf in expected.items() if not torch.equal(leaf, values[name])]
        self.complaints += [f"{job.name}: {name} differs" for name in differ]
        self.jobs.append(job.name)
        return expected


def mixing(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss with a constant in host memory."""
    return lambda *given: loss(*given) + torch.ones(2).sum() * given[1].new_ones(2).float().mul(torch.ones(2)).mean()


def complaints_of(name: str) -> tuple[list[str], list[str], int]:
    """Play two rounds of a method, on a stream of two tasks.

    Returns the complaints, the names of the jobs, and how often a captured iteration was done.

    The method ``MIXED`` is Flashback with a constant in host memory.
    """
    ordinary, Rehearsal.replays = flashback.taught, 0
    if name == MIXED:
        flashback.taught = mixing(ordinary)
    try:
        corpus = conftest.noisy_corpus()
        split = every.replace(corpus.train, x=every.np.ascontiguousarray(corpus.train.x[:, :, 2:10, 2:10]))
        corpus = every.replace(corpus, train=split, test=split, input_shape=every.SHAPE)
        parts = [every.Labelled(*corpus.batch(split, every.np.arange(start, start + 40))) for start in (300, 340)]
        fleet = Playing(
            every.build("flashback" if name == MIXED else name, True),
            corpus,
            every.SHARES,
            every.model_of(True).init(0),
            stream=every.STREAM,
            public=every.PublicData(*parts),
            executor=every.Serial(plain=True),
            rounds_per_period=1,
        )
        fleet.complaints = []
        for _ in range(2):
            fleet.play([0, 1])
        return fleet.complaints, fleet.jobs, Rehearsal.replays
    finally:
        flashback.taught = ordinary


def found(names: Sequence[str]) -> dict[str, tuple[list[str], list[str], int]]:
    """What ``complaints_of`` tells of each method. From then on this process is for nothing else."""
    captures.ORDINARY_STEPS = 1
    every.SHORT |= {name: every.SHORT[name] | more for name, more in ITERATIONS.items()}
    captures.address, captures.geometry = on_raw(captures.address), on_raw(captures.geometry)
    job_device.is_large = lambda model, variables: True
    return {name: complaints_of(name) for name in names}
