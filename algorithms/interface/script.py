"""What an algorithm is: a script that asks devices and computes at the coordinator, one generator per round.

Nothing here knows of sockets, processes or files. See ``docs/architecture.md`` for how every method fits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, Protocol, TypeVar, get_args, runtime_checkable

from fedemu.algorithms.interface.program import LocalProgram, Query
from fedemu.algorithms.interface.values import Forest, PublicData, Tree
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import DeviceId

Reduction = Literal["weighted_mean", "mean", "total", "collect"]
"""How payloads become one value."""


@dataclass(frozen=True)
class Reducer:
    """How the replies' leaves under one payload key become one value.

    ``weighted_mean`` weighs by examples, ``mean`` weighs evenly, ``total`` adds, and ``collect`` keeps one handle per
    device. The first three are exact sums, divided and rounded once to the leaf's own dtype: a partial sum of any group
    of replies merges with any other, so no order matters. ``key`` is the payload's key if the reply uses another name;
    so one key can be reduced in two ways.

    Raises ConfigurationError if there is no such kind.
    """

    kind: Reduction
    key: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Reduction):
            raise ConfigurationError(
                f"the algorithm has a Reducer of the kind {self.kind!r}; the kinds are {', '.join(get_args(Reduction))}"
                ", and what is no sum, such as a median, is computed from what collect keeps"
            )

    def of(self, key: str) -> Reducer:
        """The same reducer for the payload's ``key``, under any name in the reply."""
        return Reducer(self.kind, key)


weighted_mean = Reducer("weighted_mean")
mean = Reducer("mean")
total = Reducer("total")
collect = Reducer("collect")


@dataclass(frozen=True)
class Ask:
    """A request to a cohort.

    ``program`` is a key of ``Algorithm.programs``. All devices get the trees of ``shared``, each of which is one blob;
    a device also gets its tree of ``each``, which its program finds as ``shared["each"]``. ``reduce`` says what the
    reply holds, and from which payload key. ``cohort`` is drawn (``selected``), all devices that are on-line
    (``online``), or named.

    The round fails if fewer devices reply than the quorum needs. An ``optional`` ask accepts any number of replies; if
    nobody replied, ``Reply.values`` is empty.

    Raises ConfigurationError if ``shared``, ``reduce``, ``cohort`` or ``each`` is something else, or if ``shared`` has
    a tree called ``each`` beside those of ``each``.
    """

    program: str
    shared: Forest
    reduce: Mapping[str, Reducer]
    cohort: Literal["selected", "online"] | Sequence[DeviceId] = "selected"
    each: Mapping[DeviceId, Tree] | None = None
    optional: bool = False

    def __post_init__(self) -> None:
        # Somebody else's code gives these, and no type checker has seen it.
        shared: Any = self.shared
        if not isinstance(shared, Mapping) or not all(isinstance(tree, Mapping) for tree in shared.values()):
            raise ConfigurationError(f'{self.field("shared")} must be trees by name, as in {{"model": state.model}}')
        reduce: Any = self.reduce
        if not isinstance(reduce, Mapping) or not all(isinstance(reducer, Reducer) for reducer in reduce.values()):
            raise ConfigurationError(
                f"{self.field('reduce')} must be reducers by key of the payload, as in "
                '{"delta": weighted_mean}; the others are mean, total and collect'
            )
        cohort: Any = self.cohort
        if (isinstance(cohort, str) and cohort not in ("selected", "online")) or not isinstance(cohort, Iterable):
            raise ConfigurationError(
                f"{self.field('cohort')} is {cohort!r}; it must be 'selected', 'online' or a list of devices"
            )
        each: Any = {} if self.each is None else self.each
        if not isinstance(each, Mapping) or not all(
            isinstance(device, Integral) and isinstance(tree, Mapping) for device, tree in each.items()
        ):
            raise ConfigurationError(
                f'{self.field("each")} must be trees by device, as in {{0: {{"weight": torch.ones(())}}}}'
            )
        if each and "each" in shared:
            raise ConfigurationError(
                f"{self.field('shared')} has a tree \"each\", and programs find the trees of 'each' by this name; give "
                "the tree in 'shared' another one"
            )

    def field(self, name: str) -> str:
        """The beginning of a sentence about what the method has put into this field."""
        return f"the algorithm asks for the program {self.program!r}, and {name!r} of this Ask"


@dataclass(frozen=True)
class DeviceReply:
    """What one accepted device reported beside its payload. Label counts are None if the program does not send them."""

    device: DeviceId
    examples: int
    steps: int
    metrics: Mapping[str, float]
    label_counts: tuple[int, ...] | None


class Handle(Protocol):
    """One tree of one device's payload. It is read only when ``load`` is called."""

    device: DeviceId

    def load(self) -> Tree:
        """Read the tree."""
        ...


@dataclass(frozen=True)
class Reply:
    """The answer to an Ask. For each key of ``Ask.reduce``, ``values`` holds a Tree, or Handles in cohort order."""

    values: Mapping[str, Any]
    devices: tuple[DeviceReply, ...]


@dataclass(frozen=True)
class ServerJob:
    """A computation at the coordinator, in a process of its own. It can be resumed between two steps.

    ``init() -> carry`` begins, and ``step(carry, index) -> (carry, finished)`` runs at most ``steps`` times, with the
    index from 0. The carry is a Tree (weights, optimiser, position of the random source). It may lie on a GPU, but a
    step after a checkpoint may get it in host memory. There is a checkpoint after ``checkpoint_every`` steps, and
    then after multiples of them, about once a second. The script receives the last carry, in host memory.

    ``name`` is one line of text, which logs, displays and events show.

    Raises ConfigurationError if ``name`` is another text or none, if ``init`` or ``step`` is no function, or if a
    number is none, or too small.
    """

    name: str
    init: Callable[[], Tree]
    step: Callable[[Tree, int], tuple[Tree, bool]]
    steps: int
    checkpoint_every: int

    def __post_init__(self) -> None:
        # Somebody else's code gives these, and no type checker has seen it.
        given: Mapping[str, Any] = vars(self)
        name = given["name"]
        if not isinstance(name, str) or not name or not name.isprintable():
            raise ConfigurationError(f"the algorithm has a server job named {name!r}; its name must be a line of text")
        for field in ("init", "step"):
            if not callable(given[field]):
                raise ConfigurationError(f"{self._with(field)} is {given[field]!r}; it must be a function")
        for field, least in (("steps", 0), ("checkpoint_every", 1)):
            if not isinstance(given[field], Integral) or given[field] < least:
                raise ConfigurationError(
                    f"{self._with(field)} is {given[field]!r}; it must be a whole number, at least {least}"
                )

    def _with(self, field: str) -> str:
        return f"the algorithm has a server job {self.name!r}, and {field!r} of this ServerJob"


@dataclass(frozen=True)
class Context:
    """What a script may know of the run in one round.

    Rounds count from 1. ``task`` is the period of the stream, counted from 0. ``task_ends`` says that this is the last
    round of the task, and that another task follows. ``public`` is None if there is no public data.
    """

    round: int
    task: int
    seed: int
    classes: int
    public: PublicData | None = None
    task_ends: bool = False


S = TypeVar("S")

Script = Generator[Ask | ServerJob, Any, S]
"""A round: it yields an Ask and receives a Reply, or yields a ServerJob and receives a Tree; it returns the state."""


class Algorithm(Protocol[S]):
    """A federated method. ``S`` is a frozen dataclass whose fields are Trees, Forests, tensors and plain scalars."""

    @property
    def programs(self) -> Mapping[str, LocalProgram | Query]:
        """What devices may be asked to run, by the name that an Ask gives."""
        ...

    def init(self, variables: Tree, context: Context) -> S:
        """The state before the first round, from the variables of a new model."""
        ...

    def round(self, state: S, context: Context) -> Script[S]:
        """One round as a generator. It may run again from its beginning, so it keeps nothing outside the state."""
        ...

    def variables(self, state: S) -> Tree:
        """The global model with its buffers: what is evaluated, saved and digested."""
        ...


@runtime_checkable
class Remarking(Protocol):
    """An Algorithm that puts numbers of its own on record after a round."""

    def remarks(self, state: Any) -> Mapping[str, Any]:
        """Numbers by name, for the column ``remarks`` of the round's row. May be empty.

        In place of a number there may be a text, or a list or a mapping of these. Other objects are refused.
        """
        ...


@runtime_checkable
class Picturing(Protocol):
    """An Algorithm that generates images of classes, which people may look at."""

    def pictures(self, state: Any, samples: int, seed: int) -> Tree:
        """``samples`` images of each class that can be generated: ``x [n, channels, height, width]`` and ``y [n]``.

        ``x`` is normalised, as the model takes it. ``y`` int64 are the classes that the images should show. ``state``
        may be the state after any round; pictures are made after the first round of a task, in which generators are
        trained anew. The tree is empty if there is no generator yet. The result depends on the arguments alone: all
        random draws come from ``seed``, and the run does not change.
        """
        ...


@runtime_checkable
class Selecting(Protocol):
    """An Algorithm whose devices have replay buffers. Your own needs ``replay.strategy = "own"``.

    In the last round of a period (``Context.task_ends``) it asks the devices that are on-line for ``selection``, as the
    last ask of the round. If a device was away when a period ended, the period's samples are sealed. At its next work,
    for any program, the device first answers ``selection`` for each sealed period, the oldest first, with the
    ``shared`` of that work.
    """

    @property
    def selection(self) -> Query:
        """The question that chooses the samples to keep."""
        ...
