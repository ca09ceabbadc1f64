"""What a local term is: a summand of every method's local loss, and what it needs of tasks that are over.

A term finds what is remembered in ``Pass.shared``: the global model at the end of the last task under ``PREVIOUS``, and
its importances under ``importance_key``. In the first task nothing is there. ``remembering.py`` keeps and sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Final

from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import NamedTerm, Term
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import an_object

PREVIOUS: Final = "terms.previous"
"""The key among the shared trees of the global model at the end of the last task, with its buffers."""

COUNTS: Final = "samples"
"""The key of the numbers of samples, by the name of a term, among what a device answers about importances."""


def importance_key(name: str) -> str:
    """The key among the shared trees of the importances of the term ``name``."""
    return f"terms.{name}"


@dataclass(frozen=True)
class Importance:
    """How important each trained variable is for what was learnt: a mean over samples.

    ``value`` is a function of (logits, batch, facts) of a batch of one sample. Its gradient by the trained variables is
    that of one sample, and ``strength`` makes of each of its leaves a leaf of numbers that are not negative. A device
    takes at most ``samples`` of its samples of the task that ends, at least 1. The sum over tasks is multiplied by
    ``decay`` before a task is added. Raises ConfigurationError if something is of another type, or for other
    ``samples``.
    """

    value: Callable[[Tensor, Batch, Facts], Tensor]
    strength: Callable[[Tensor], Tensor]
    samples: int
    decay: float

    def __post_init__(self) -> None:
        for what in ("value", "strength"):
            if not callable(function := getattr(self, what)):
                raise ConfigurationError(f"{what} of an Importance is {an_object(function)}; it must be a function")
        if isinstance(self.decay, bool) or not isinstance(self.decay, Real):
            raise ConfigurationError(f"decay of an Importance is {an_object(self.decay)}; it must be a number")
        if not isinstance(self.samples, int) or self.samples < 1:
            raise ConfigurationError(
                f"an Importance can't take {self.samples!r} samples of a device; it must be a whole number above 0"
            )


@dataclass(frozen=True)
class LocalTerm:
    """A term that goes with every method, and what has to be remembered for it.

    Importances are kept under ``importance_key(name)``. ``previous`` says whether the term needs the global model at
    the end of the last task. With an ``importance`` the fleet is asked for it when a task ends. ``notes`` are the
    shapes of what it has to know of each sample (``Noting``). ``otherwise`` is given if the term takes away a part of
    ``algorithm.loss``, so that it fits only methods whose devices minimise this loss as a whole. It is what to set for
    other methods.

    Raises ConfigurationError if ``name`` is no text, or one under which something else is kept or answered, or if
    something else is of another type.
    """

    name: str
    term: Term
    previous: bool = True
    importance: Importance | None = None
    notes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    otherwise: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name == COUNTS or importance_key(self.name) == PREVIOUS:
            raise ConfigurationError(
                f"a LocalTerm can't have the name {self.name!r}; give it a text other than 'previous' and {COUNTS!r}, "
                "under which something else is kept"
            )
        self._require("term", callable(self.term), "a function of the model and a Pass")
        self._require("previous", isinstance(self.previous, bool), "true or false")
        self._require("importance", isinstance(self.importance, Importance | None), "an Importance, or None")
        self._require("notes", isinstance(self.notes, Mapping), "a dict of shapes by name")
        for note, shape in self.notes.items():
            fits = isinstance(shape, tuple | list) and all(isinstance(size, int) for size in shape)
            self._require(
                f"notes[{note!r}]", fits and isinstance(note, str), "a shape by a name, as {'y': (10,)}", shape
            )
        self._require("otherwise", isinstance(self.otherwise, str), "a text")

    def _require(self, what: str, fits: bool, must: str, value: object = None) -> None:
        """Raise ConfigurationError, unless it fits."""
        if not fits:
            found = an_object(getattr(self, what, value))
            raise ConfigurationError(f"{what} of the LocalTerm {self.name!r} is {found}; it must be {must}")


def with_local_terms(ingredients: Ingredients, terms: Mapping[str, LocalTerm]) -> Ingredients:
    """The ingredients from which methods are built whose devices have these terms in their losses."""
    notes = dict(ingredients.notes)
    for term in terms.values():
        notes |= term.notes
    return replace(ingredients, terms=tuple(named(name, term) for name, term in terms.items()), notes=notes)


def named(name: str, term: LocalTerm) -> NamedTerm:
    """The term as it stands in a loss."""
    return NamedTerm(name, term.term, term.previous)
