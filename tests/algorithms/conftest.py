"""A little fleet for the tests of methods: real programs and scripts, without processes, messages or churn."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.interface import (
    Algorithm,
    Ask,
    Context,
    DeviceReply,
    Labelled,
    Model,
    Outputs,
    PublicData,
    Reducer,
    Reply,
    Selecting,
    ServerJob,
    Tree,
)
from fedemu.algorithms.models.around import ModelAround
from fedemu.algorithms.models.growing import Growing
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.replay.buffer import Buffer
from fedemu.device.compute.executors.executor import Executor, Job, JobResult, Source
from fedemu.device.compute.executors.query import catch_up, run_query
from fedemu.device.compute.executors.serial import Serial
from fedemu.protocol.ids import DeviceId, Digest

T = TypeVar("T")

CLASSES = 4
SHAPE = (1, 12, 12)
SAMPLES = 400


def noisy_corpus() -> Corpus:
    """Pictures of four classes: noise, and one bright quarter that depends on the class."""
    random = np.random.default_rng(0)
    y = np.arange(SAMPLES) % CLASSES
    x = random.integers(0, 128, (SAMPLES, *SHAPE)).astype(np.uint8)
    for i, label in enumerate(y):
        row, column = divmod(int(label), 2)
        x[i, 0, 6 * row : 6 * row + 6, 6 * column : 6 * column + 6] += 100
    split = Split(x, y.astype(np.int64), {})
    names = tuple("abcd")
    return Corpus("quarters", split, split, names, SHAPE, np.array([88.0]), np.array([57.0]), Digest("0" * 64))


@dataclass
class LittleFleet:
    """Plays an algorithm's script; ``shares[i]`` are the samples of device ``i`` in ``corpus.train``.

    With a ``stream``, ``stream[t][i]`` are the samples of device ``i`` in period t, which takes ``rounds_per_period``
    rounds. If the algorithm selects, devices have replay buffers for ``budget`` samples.

    After each round ``state`` is the algorithm's state, ``own`` are the own states and ``buffers`` the replay buffers
    of devices. ``payloads`` are those of the last ask, by device; ``sent`` are those of all asks of the round. ``asks``
    are the asks so far, ``jobs`` the names of server jobs so far, and ``carries`` their results.
    """

    algorithm: Algorithm[Any]
    corpus: Corpus
    shares: Sequence[Any]
    variables: Tree
    public: PublicData | None = None
    executor: Executor = field(default_factory=Serial)
    seed: int = 5
    stream: Sequence[Sequence[Any]] = ()
    rounds_per_period: int = 1
    budget: int = 0
    round: int = 0
    state: Any = None
    own: dict[int, Tree] = field(default_factory=dict)
    buffers: dict[int, Buffer] = field(default_factory=dict)
    payloads: dict[int, Mapping[str, Tree]] = field(default_factory=dict)
    sent: list[dict[int, Mapping[str, Tree]]] = field(default_factory=list)
    results: dict[int, JobResult] = field(default_factory=dict)
    jobs: list[str] = field(default_factory=list)
    carries: list[Tree] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._online: list[Sequence[int]] | None = None
        self.state = self.algorithm.init(self.variables, self._context())

    @property
    def model(self) -> Tree:
        return self.algorithm.variables(self.state)

    def play(
        self, cohort: Sequence[int], lost: Sequence[int] = (), online: Sequence[Sequence[int]] | None = None
    ) -> Any:
        """Play one round with these devices. Those in ``lost`` train too, but their results and states are discarded.

        ``online`` are the devices that answer the round's first, second, ... ask to all devices. By default the whole
        fleet answers every ask.
        """
        self.round += 1
        self.sent = []
        self._online = None if online is None else list(online)
        script = self.algorithm.round(self.state, self._context())
        answer: Any = None
        try:
            while True:
                request = script.send(answer)
                answer = self._ask(request, cohort, lost) if isinstance(request, Ask) else self._compute(request)
        except StopIteration as end:
            self.state = end.value
        return self.state

    @property
    def period(self) -> int:
        return min(max(self.round - 1, 0) // self.rounds_per_period, max(len(self.stream) - 1, 0))

    def _context(self) -> Context:
        ends = self.period < len(self.stream) - 1 and self.round % self.rounds_per_period == 0 and self.round > 0
        return Context(self.round, self.period, self.seed, self.corpus.classes, self.public, ends)

    def _ask(self, ask: Ask, cohort: Sequence[int], lost: Sequence[int]) -> Reply:
        self.asks.append(ask)
        if ask.cohort == "online":
            cohort = range(len(self.stream[0] if self.stream else self.shares))
            cohort = cohort if self._online is None else self._online.pop(0)
        elif not isinstance(ask.cohort, str):
            cohort = [int(device) for device in ask.cohort]
        self.results = {}
        for i, result in zip(cohort, self._run(ask, [self._job(ask, i) for i in cohort]), strict=True):
            if i not in lost:
                self.results[i] = result
                if result.own:
                    self.own[i] = result.own
                if result.buffer is not None:
                    self.buffers[i] = result.buffer
        self.payloads = {i: result.payload for i, result in self.results.items()}
        self.sent.append(self.payloads)
        if ask.optional and not self.results:
            return Reply({}, ())
        replies = tuple(
            DeviceReply(DeviceId(i), result.examples, result.steps, result.metrics, result.label_counts)
            for i, result in self.results.items()
        )
        return Reply({key: self._reduce(key, reducer) for key, reducer in ask.reduce.items()}, replies)

    def _job(self, ask: Ask, device: int) -> Job:
        samples = np.asarray(self.stream[self.period][device] if self.stream else self.shares[device], dtype=np.int64)
        each = (ask.each or {}).get(DeviceId(device), {})
        job = Job(device, self.round, self.period, samples, each, self.own.get(device), budget=self.budget)
        if not isinstance(self.algorithm, Selecting):
            return job
        sealed = {t: np.asarray(self.stream[t][device], dtype=np.int64) for t in range(self.period)}
        return replace(job, buffer=self.buffers.get(device, Buffer()), sealed=sealed)

    def _run(self, ask: Ask, jobs: Sequence[Job]) -> list[JobResult]:
        program: Any = self.algorithm.programs[ask.program]
        source = Source(self.corpus, self.seed, torch.device("cpu"))
        if isinstance(self.algorithm, Selecting):
            selection = self.algorithm.selection
            jobs = [checked(catch_up(selection, ask.shared, job, source), Job) for job in jobs]
        if hasattr(program, "ask"):
            return [checked(run_query(program, ask.shared, job, source), JobResult) for job in jobs]
        results = [
            checked(result, JobResult)
            for result in self.executor.run(program, ask.shared, [job.over_all() for job in jobs], source)
        ]
        return [replace(result, buffer=job.buffer) for result, job in zip(results, jobs, strict=True)]

    def _reduce(self, key: str, reducer: Reducer) -> Any:
        trees = {i: payload[reducer.key or key] for i, payload in self.payloads.items()}
        if reducer.kind == "collect":
            return [_Loaded(DeviceId(i), tree) for i, tree in trees.items()]
        weighted = reducer.kind == "weighted_mean" and any(self.results[i].examples for i in trees)
        weights = {i: self.results[i].examples if weighted else 1 for i in trees}
        divisor = 1 if reducer.kind == "total" else sum(weights.values())
        first = next(iter(trees.values()))
        return {
            name: (sum(weights[i] * tree[name].double() for i, tree in trees.items()) / divisor).to(leaf.dtype)
            for name, leaf in first.items()
        }

    def _compute(self, job: ServerJob) -> Tree:
        self.jobs.append(job.name)
        carry = job.init()
        for index in range(job.steps):
            carry, finished = job.step(carry, index)
            if finished:
                break
        self.carries.append(carry)
        return carry


def checked(result: Any, kind: type[T]) -> T:
    assert isinstance(result, kind), result
    return result


@dataclass(frozen=True)
class _Loaded:
    device: DeviceId
    tree: Tree

    def load(self) -> Tree:
        return self.tree


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    return noisy_corpus()


@pytest.fixture(scope="session")
def public(corpus: Corpus) -> PublicData:
    """The last 100 samples of ``corpus.train``: 40 to train on and 60 for validation."""
    train, validation = (corpus.batch(corpus.train, np.arange(*ends)) for ends in ((300, 340), (340, 400)))
    return PublicData(Labelled(*train), Labelled(*validation))


class HalfLinear(nn.Module):
    """A linear layer in half precision, with exact logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(SHAPE), CLASSES).to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.flatten(1).to(torch.bfloat16)).float()
        return logits


class Viewing(nn.Module):
    """A linear model that cannot be applied to no samples, because ``view`` does not know then what -1 stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(math.prod(SHAPE), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.linear(x.view(len(x), -1))
        return logits


@dataclass(frozen=True, eq=False)
class Louder(ModelAround):
    """The model, whose features and logits are twice as large in training mode."""

    model: Model

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        outputs, buffers = self.model.apply(variables, x, train)
        factor = 2 if train else 1
        return Outputs(factor * outputs.logits, factor * outputs.features, outputs.statistics), buffers


@pytest.fixture
def louder() -> Callable[[Any], Any]:
    """``louder(model)`` is the model, whose features and logits are twice as large in training mode.

    So a test sees which mode a loss takes. A growing model stays one.
    """
    return lambda model: replace(model, model=Louder(model.model)) if isinstance(model, Growing) else Louder(model)


@pytest.fixture
def viewing() -> Model:
    """A model of the corpus of quarters that cannot be applied to no samples."""
    return from_module(Viewing)


@pytest.fixture
def half_linear() -> Model:
    """A linear model whose variables are bfloat16."""
    return from_module(HalfLinear)


@pytest.fixture(scope="module")
def little_fleet(corpus: Corpus) -> Callable[..., LittleFleet]:
    """``little_fleet(algorithm, variables, shares, **fields)`` over the corpus of quarters, on one thread."""
    torch.set_num_threads(1)

    def make(algorithm: Algorithm[Any], variables: Tree, shares: Sequence[Any], **fields: Any) -> LittleFleet:
        return LittleFleet(algorithm, corpus, shares, variables, **fields)

    return make
