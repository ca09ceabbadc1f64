"""What devices are asked to run: local training as pure functions, or a question to a device's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.interface.values import Batch, Facts, Forest, Kind, Outcome, Tree

if TYPE_CHECKING:
    from torch import Tensor


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
