"""What an algorithm is: a script that asks devices and computes at the coordinator, and the programs that devices run.

Nothing here knows of sockets, processes or files. See ``docs/architecture.md`` for how every method fits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface.values import PublicData
from fedemu.protocol.ids import DeviceId

Tree = Mapping[str, Tensor]
"""Tensors by dotted name, flat."""
Forest = Mapping[str, Tree]
"""Trees by top-level key: ``model``, ``generator``, ``control``. On the wire a leaf is called ``key/name``."""


class Facts(NamedTuple):
    """What a program may know of its device and round; all zero-dimensional tensors but ``label_counts`` ``[classes]``.

    ``steps`` counts those of all stages. ``first_visit`` is a bool tensor: a device's own state is then all zeros.
    """

    examples: Tensor
    steps: Tensor
    lr: Tensor
    round: Tensor
    task: Tensor
    first_visit: Tensor
    label_counts: Tensor


class Batch(NamedTuple):
    """``x [batch, ...]`` as the model takes it, ``y [batch]`` int64, ``weight [batch]`` float32: 0 marks padding."""

    x: Tensor
    y: Tensor
    weight: Tensor


class Outcome(NamedTuple):
    """What a program leaves behind: the payload for the coordinator, and the device's next own state."""

    payload: Forest
    own: Tree


Kind = Literal["dense", "convolutional", "sequence"]
"""Of a network: what the choice of an executor goes by."""
Plan = Callable[[int, np.random.Generator], NDArray[np.int64]]
"""(examples, generator) -> positions ``[steps, batch]`` into the device's samples; -1 pads.

Pure: the number of steps, and whether anything is drawn at all, depend on the number of examples only.
"""
Step = Callable[[Any, Batch, Forest, Tree, Facts, Tree], tuple[Any, Tree]]
"""(carry, batch, shared, own, facts, noise) -> (carry, metrics); pure, and usable under ``torch.func.vmap``."""


class Augment(Protocol):
    """Random changes of a batch's samples: drawn in numpy per device, applied outside of the step."""

    def draw(
        self, generator: np.random.Generator, rows: int, sample_shape: Sequence[int]
    ) -> Mapping[str, NDArray[Any]]:
        """Random choices for so many rows, leaves ``[rows, ...]``."""
        ...

    def apply(self, x: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """``x [rows, ...]`` changed by the draws, row by row."""
        ...


@dataclass(frozen=True)
class Stage:
    """One or more passes over the device's data with one carry.

    ``rows_matter`` says whether rows of weight 0 can change what the step makes (as in a batch's statistics); where
    they can't, an executor may leave them out.
    """

    plan: Plan
    step: Step
    augment: Augment | None = None
    rows_matter: bool = True


class LocalProgram(Protocol):
    """Training at a device, as pure functions of tensors; an executor decides how many devices run at once.

    Under ``vmap`` every tensor gains a leading device dimension that the functions do not see. So: no ``.item()``, no
    branching on values, no random numbers inside (they come through ``noise``), and ``own`` of one structure always.
    """

    @property
    def stages(self) -> tuple[Stage, ...]: ...

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """Standard normal tensors by name and shape, drawn afresh per device and step."""
        ...

    @property
    def passes(self) -> float:
        """How often an example is processed; sets the emulated compute time."""
        ...

    @property
    def declares_label_counts(self) -> bool:
        """Whether the label counts may leave the device with the result."""
        ...

    def learning_rate(self, round: int, task: int) -> float: ...

    def initial_own(self, shared: Forest) -> Tree:
        """The all-zero own state of a first visit; empty where a program keeps none."""
        ...

    def payload(self, shared: Forest) -> Forest:
        """Tensors with the shapes and dtypes that ``finish`` will return; their values do not matter."""
        ...

    def begin(self, shared: Forest, own: Tree, facts: Facts) -> Any: ...

    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome: ...


@runtime_checkable
class OfItsOwnKind(Protocol):
    """A LocalProgram that may spend its time in another kind of network than the experiment's model."""

    @property
    def kind(self) -> Kind: ...


@runtime_checkable
class Revealing(Protocol):
    """A LocalProgram whose payload tells the device's trained model, which diagnosis then looks at."""

    def local_model(self, shared: Forest, payload: Forest) -> Tree:
        """All variables after training, from what the device was sent and what it replied; in the model's dtypes."""
        ...


@dataclass(frozen=True)
class Memory:
    """What a device holds when it is asked: its replay buffer R_t, and what of the period's samples X_t has arrived.

    ``batch`` holds both, the buffer's first, each part in the order of its arrival. ``indices [n]`` point into the
    training split, ``fresh [n]`` is true for X_t, and ``periods [n]`` tell when a sample came. ``period`` is that of
    X_t, ``budget`` how many samples may be kept after it, ``seen`` how many the device ever had, X_t included.
    ``generator`` is the device's own in this period: the same whenever it is asked.
    """

    batch: Batch
    indices: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    periods: NDArray[np.int64]
    period: int
    budget: int
    seen: int
    generator: np.random.Generator


class Query(Protocol):
    """A question to a device's memory, answered at once.

    The second value names the positions of the samples to keep; with it the period is over for the device, and the
    rest is gone. ``own`` is what the last question of this period left behind, empty at first; ``facts.steps`` and
    ``facts.lr`` are 0.
    """

    @property
    def passes(self) -> float: ...

    @property
    def declares_label_counts(self) -> bool: ...

    def payload(self, shared: Forest) -> Forest: ...

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]: ...


@runtime_checkable
class Selecting(Protocol):
    """An Algorithm whose devices have replay buffers.

    A device that was away when a period ended keeps its samples sealed. At its next work, of whatever program, it first
    asks itself ``selection``, with what that work shares with all devices, once for each such period, oldest first.
    """

    @property
    def selection(self) -> Query: ...


@dataclass(frozen=True)
class Reducer:
    """How the replies' leaves under one payload key become one value.

    ``weighted_mean`` weighs by examples, ``mean`` evenly, ``total`` adds, ``collect`` keeps lazy handles per device.
    Folds run in cohort order, in float64, and come back in the leaf's own dtype. ``key`` is the payload's
    where the reply goes by another, which lets one key be reduced in two ways.
    """

    kind: Literal["weighted_mean", "mean", "total", "collect"]
    key: str | None = None

    def of(self, key: str) -> Reducer:
        """The same over the payload's ``key``, whatever the reply calls it."""
        return Reducer(self.kind, key)


weighted_mean = Reducer("weighted_mean")
mean = Reducer("mean")
total = Reducer("total")
collect = Reducer("collect")


@dataclass(frozen=True)
class Ask:
    """A request to a cohort, each device of which gets its part. ``shared`` becomes one blob per top-level key.

    The round can't do without enough replies, by the experiment's quorum. An ``optional`` ask is content with any
    number; where nobody replied, ``Reply.values`` is empty.
    """

    program: str
    shared: Forest
    reduce: Mapping[str, Reducer]
    cohort: Literal["selected", "online"] | Sequence[DeviceId] = "selected"
    each: Mapping[DeviceId, Tree] | None = None
    optional: bool = False


@dataclass(frozen=True)
class DeviceReply:
    """What one accepted device said beside its payload."""

    device: DeviceId
    examples: int
    steps: int
    metrics: Mapping[str, float]
    label_counts: tuple[int, ...] | None


class Handle(Protocol):
    """A payload subtree of one device that is read when it is wanted."""

    device: DeviceId

    def load(self) -> Tree: ...


@dataclass(frozen=True)
class Reply:
    """The answer to an Ask: one reduced Tree, or Handles in cohort order, per key of ``Ask.reduce``."""

    values: Mapping[str, Any]
    devices: tuple[DeviceReply, ...]


@dataclass(frozen=True)
class ServerJob:
    """Work at the coordinator, in a process of its own, resumable: ``step`` maps carry to carry.

    ``init() -> carry`` and ``step(carry, index) -> (carry, finished)``; the carry is a Tree (weights, optimiser,
    position of the random source). It is checkpointed every ``checkpoint_every`` steps; the reply is the last carry.
    """

    name: str
    init: Callable[[], Tree]
    step: Callable[[Tree, int], tuple[Tree, bool]]
    steps: int
    checkpoint_every: int


@dataclass(frozen=True)
class Context:
    """What a script may know of the run at one round.

    ``task`` counts the periods of the stream from 0; ``task_ends`` says that this is its last round and that another
    one follows.
    """

    round: int
    task: int
    seed: int
    classes: int
    public: PublicData | None = None
    task_ends: bool = False


S = TypeVar("S")

Script = Generator[Ask | ServerJob, Any, S]
"""Yields requests, receives Reply (for Ask) or Tree (for ServerJob), returns the next state."""


class Algorithm(Protocol[S]):
    """A federated method. ``S`` is a frozen dataclass whose fields are Trees, Forests, tensors and plain scalars."""

    @property
    def programs(self) -> Mapping[str, LocalProgram | Query]: ...

    def init(self, variables: Tree, context: Context) -> S: ...

    def round(self, state: S, context: Context) -> Script[S]: ...

    def variables(self, state: S) -> Tree:
        """The global model: what is evaluated, saved and digested, buffers included."""
        ...


class Outputs(NamedTuple):
    """``logits [batch, classes]``, ``features [batch, width]`` (the last layer's input), ``statistics`` of layers.

    A language model gives them for every token, ``[batch, length, ...]``.
    """

    logits: Tensor
    features: Tensor
    statistics: Tree


@runtime_checkable
class Remarking(Protocol):
    """An Algorithm that has something to put on record after a round."""

    def remarks(self, state: Any) -> Mapping[str, Any]:
        """Plain numbers and lists of numbers by name, for the column ``remarks`` of the round's row; may be empty."""
        ...


@runtime_checkable
class Picturing(Protocol):
    """An Algorithm that generates images of classes, which people may look at."""

    def pictures(self, state: Any, samples: int, seed: int) -> Tree:
        """``samples`` images of each class that can be generated: ``x [n, channels, height, width]`` and ``y [n]``.

        ``x`` is normalised, as the model takes it; ``y`` int64 are the classes that the images are to show. ``state``
        is that after any round; who shows pictures asks after the first of a task, in which generators are made anew.
        Empty where there is nothing to generate from. A function of its arguments, which draws by ``seed`` only and
        leaves the run as it is.
        """
        ...


class Model(Protocol):
    """A network as pure functions; parameters and buffers are leaves of one Tree."""

    @property
    def kind(self) -> Kind:
        """What the executor's rule goes by, unless a program is of its own kind."""
        ...

    @property
    def buffers(self) -> frozenset[str]:
        """Names of the variables that are not trained (running statistics)."""
        ...

    def init(self, seed: int) -> Tree: ...

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        """Returns the outputs and the next buffers (the same Tree as given where nothing changed)."""
        ...
