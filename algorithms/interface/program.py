"""What devices are asked to run: local training as pure functions, or a question to a device's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.interface.values import Batch, Facts, Forest, Kind, Outcome, Tree

if TYPE_CHECKING:
    from torch import Tensor


Plan = Callable[[int, np.random.Generator], NDArray[np.int64]]
"""(examples, generator) -> positions ``[steps, batch]`` into the device's samples. -1 marks padding.

The function is pure. The number of steps, and whether it draws at all, depend only on the number of examples.
"""
Step = Callable[[Any, Batch, Forest, Tree, Facts, Tree], tuple[Any, Tree]]
"""(carry, batch, shared, own, facts, noise) -> (carry, metrics). It is pure, and usable under ``torch.func.vmap``."""


class Augment(Protocol):
    """Random changes of a batch's samples. They are drawn in numpy per device, and applied outside the step."""

    def draw(
        self, generator: np.random.Generator, rows: int, sample_shape: Sequence[int]
    ) -> Mapping[str, NDArray[Any]]:
        """Random choices for ``rows`` samples. Each leaf is ``[rows, ...]``."""
        ...

    def apply(self, x: Tensor, draws: Mapping[str, Tensor]) -> Tensor:
        """The samples ``x [rows, ...]``, each changed by its row of the draws."""
        ...


@dataclass(frozen=True)
class Stage:
    """One or more passes over the device's data with one carry.

    ``rows_matter`` says whether rows of weight 0 can change the result of a step, as they do in statistics of a batch.
    If they cannot, an executor may leave them out.
    """

    plan: Plan
    step: Step
    augment: Augment | None = None
    rows_matter: bool = True


class LocalProgram(Protocol):
    """Training at a device, as pure functions of tensors. An executor decides how many devices run at once.

    Under ``vmap`` every tensor has a leading device dimension that the functions do not see. Therefore they call no
    ``.item()``, do not branch on values, and draw no random numbers (those come as ``noise``). ``own`` always has the
    same structure.
    """

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The passes over the data, one after the other, between ``begin`` and ``finish``."""
        ...

    @property
    def noise(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of standard normal tensors, by name. They are drawn anew for each device and step."""
        ...

    @property
    def passes(self) -> float:
        """How often an example is processed. The emulated compute time is in proportion to it."""
        ...

    @property
    def declares_label_counts(self) -> bool:
        """Whether the label counts leave the device with the result."""
        ...

    def learning_rate(self, round: int, task: int) -> float:
        """The learning rate of a round (from 1) in a task (from 0); steps read it as ``facts.lr``."""
        ...

    def initial_own(self, shared: Forest) -> Tree:
        """The own state of a first visit: zeros, or empty if the program keeps none.

        A device has one own state for all programs of a method. All of them give it the same names, shapes and dtypes.
        """
        ...

    def payload(self, shared: Forest) -> Forest:
        """Tensors with the shapes and dtypes that ``finish`` will return. Their values do not matter."""
        ...

    def begin(self, shared: Forest, own: Tree, facts: Facts) -> Any:
        """The carry before the first step: tensors in any structure that torch maps over."""
        ...

    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        """The payload and the next own state, from the carry after the last step."""
        ...


@runtime_checkable
class CountingSteps(Protocol):
    """A LocalProgram that processes some samples in any case, however many examples the device has."""

    @property
    def processed(self) -> float:
        """How many samples are processed beside ``passes`` over the examples. A device without examples has none."""
        ...


@runtime_checkable
class OfItsOwnKind(Protocol):
    """A LocalProgram that may spend its time in another kind of network than the experiment's model."""

    @property
    def kind(self) -> Kind:
        """The kind of the network in which most of the time is spent."""
        ...


@runtime_checkable
class Noting(Protocol):
    """A LocalProgram whose batches tell what is noted of their samples (``Batch.notes``)."""

    @property
    def notes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each note of one sample, by name.

        REPLAYED is 0 or 1. All other notes are what the device's replay buffer holds beside a sample, and NaN where it
        holds nothing: for samples of the present period, and for single values that were not known.
        """
        ...


@runtime_checkable
class Revealing(Protocol):
    """A LocalProgram whose payload determines the device's trained model. Diagnosis tests this model."""

    def local_model(self, shared: Forest, payload: Forest) -> Tree:
        """All variables after training, in the model's dtypes: from what the device was sent and what it replied."""
        ...


@dataclass(frozen=True)
class Memory:
    """What a device holds when it is asked: its replay buffer R_t, and the samples X_t of the period that have arrived.

    ``batch`` holds both, the buffer's samples first, each part in the order of arrival. ``indices [n]`` point into the
    training split, ``fresh [n]`` is true for X_t, and ``periods [n]`` are the periods in which samples came. ``period``
    is the period of X_t, ``budget`` is the number of samples that may be kept after it, and ``seen`` is the number that
    the device ever had, with X_t. ``generator`` belongs to the device and the period: each question finds it in the
    same state. ``notes`` are those of the buffer's samples, each ``[buffer, ...]``.
    """

    batch: Batch
    indices: NDArray[np.int64]
    fresh: NDArray[np.bool_]
    periods: NDArray[np.int64]
    period: int
    budget: int
    seen: int
    generator: np.random.Generator
    notes: Tree = field(default_factory=dict)


class Query(Protocol):
    """A question to a device's memory, without training."""

    @property
    def passes(self) -> float:
        """How often an example is processed. The emulated compute time is in proportion to it."""
        ...

    @property
    def declares_label_counts(self) -> bool:
        """Whether the label counts leave the device with the answer."""
        ...

    def payload(self, shared: Forest) -> Forest:
        """Tensors with the shapes and dtypes of the answer's payload. Their values do not matter."""
        ...

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        """The answer, and the positions in the memory of the samples to keep; None keeps everything for now.

        With positions the period is over for the device: it drops all other samples. The answer's own state then holds
        the notes of the samples to keep, ``[kept, ...]`` each, in the order of the positions. The argument ``own`` is
        what the last question of this period left behind; it is empty at first. ``facts.steps`` and ``facts.lr`` are 0.
        """
        ...


@runtime_checkable
class Measuring(Protocol):
    """A LocalProgram or Query of which some trees measure the method, and are no part of it.

    These trees travel, but cost no emulated traffic and so no virtual time: the run is the same with and without them.
    """

    @property
    def measured(self) -> frozenset[str]:
        """The keys of such trees, in ``shared`` and in the payload."""
        ...
