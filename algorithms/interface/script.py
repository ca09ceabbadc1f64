"""What an algorithm is: a script that asks devices and computes at the coordinator, one generator per round.

Nothing here knows of sockets, processes or files. See ``docs/architecture.md`` for how every method fits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

from fedemu.algorithms.interface.program import LocalProgram, Query
from fedemu.algorithms.interface.values import Forest, PublicData, Tree
from fedemu.protocol.ids import DeviceId


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


@runtime_checkable
class Selecting(Protocol):
    """An Algorithm whose devices have replay buffers.

    A device that was away when a period ended keeps its samples sealed. At its next work, of whatever program, it first
    asks itself ``selection``, with what that work shares with all devices, once for each such period, oldest first.
    """

    @property
    def selection(self) -> Query: ...
