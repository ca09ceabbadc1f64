"""Local terms as an algorithm around any method: it keeps what they need of tasks that are over, and sends it along.

When a task ends, the global model becomes the previous model. If a term needs importances, the devices that are on-line
are asked for those of their samples of the task, while they still have these samples. The fleet's mean over samples is
added to what is kept. From then on the kept trees go with every ask. They change once per task, so a machine gets them
once per task.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from fedemu.algorithms.interface import (
    Algorithm,
    Around,
    Ask,
    Context,
    Forest,
    Model,
    Reply,
    Script,
    Selecting,
    ServerJob,
    Tree,
    total,
)
from fedemu.algorithms.terms.importance import AskImportance
from fedemu.algorithms.terms.local_term import COUNTS, PREVIOUS, LocalTerm, importance_key, named
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import NamedTerm, Objective
from fedemu.algorithms.trees import SUM_UNIT, map_leaves
from fedemu.protocol.errors import ConfigurationError

IMPORTANCE: Final = "importance"
"""The name of the program by which devices are asked for importances."""
S = TypeVar("S")


@dataclass(frozen=True)
class TermsState(Generic[S]):
    """The state of the inner method, the trees that are kept for the terms, and the remarks of the last round."""

    inner: S
    kept: Forest = field(default_factory=dict)
    remarks: Mapping[str, Any] = field(default_factory=dict)


class WithTerms(Around[S]):
    """The rounds of the method ``inner``, whose programs have the ``terms`` in their losses.

    Raises ConfigurationError if a program of ``inner`` has the name of the question for importances, or if ``inner``
    lets devices select before they could answer it.
    """

    def __init__(self, inner: Algorithm[S], terms: Mapping[str, LocalTerm], model: Model) -> None:
        self._previous = any(term.previous for term in terms.values())
        self._measures = {term.name: term.importance for term in terms.values() if term.importance is not None}
        asking = {IMPORTANCE: AskImportance(model, self._measures)} if self._measures else {}
        super().__init__(inner, asking, "local terms have")
        if self._measures and isinstance(inner, Selecting):
            raise ConfigurationError(
                f"algorithm.terms.{next(iter(self._measures))} asks devices for importances when a task ends, but "
                "this method has them drop the task's samples before; remove the term, or choose another method"
            )

    def init(self, variables: Tree, context: Context) -> TermsState[S]:
        return TermsState(self._inner.init(variables, context))

    def round(self, state: TermsState[S], context: Context) -> Script[TermsState[S]]:
        inner = yield from _sending(self._inner.round(state.inner, context), state.kept)
        if not context.task_ends:
            return TermsState(inner, state.kept)
        variables = self._inner.variables(inner)
        kept = dict(state.kept)
        remarks: dict[str, Any] = {}
        if self._measures:
            shared = {"model": variables}
            reduce = dict.fromkeys([*self._measures, COUNTS], total)
            reply: Reply = yield Ask(IMPORTANCE, shared, reduce, "online", optional=True)
            kept |= self._summed_up(kept, reply)
            remarks = {"importance": {"period": context.task, "devices": len(reply.devices)}}
        if self._previous:
            kept[PREVIOUS] = variables
        return TermsState(inner, kept, remarks)

    def remarks(self, state: TermsState[S]) -> Mapping[str, Any]:
        """The remarks of ``inner``. When a task ended also ``importance``, if devices were asked for it."""
        return {**super().remarks(state), **state.remarks}

    def _summed_up(self, kept: Forest, reply: Reply) -> Forest:
        """The importances with those of the task that ended. If no device had samples, they stay as they are."""
        after: dict[str, Tree] = {}
        for name, importance in self._measures.items():
            samples = float(reply.values[COUNTS][name]) if reply.devices else 0.0
            if samples:
                mean = map_leaves(lambda leaf, samples=samples: leaf * SUM_UNIT / samples, reply.values[name])
                before = kept.get(importance_key(name))
                after[importance_key(name)] = mean if before is None else _decayed(importance.decay, before, mean)
        return after


def _decayed(decay: float, before: Tree, new: Tree) -> Tree:
    return map_leaves(lambda old, leaf: decay * old + leaf, before, new)


def _sending(script: Script[S], kept: Forest) -> Generator[Ask | ServerJob, Any, S]:
    """The script, with the kept trees among the shared ones of each of its asks."""
    answer: Any = None
    try:
        while True:
            request = script.send(answer)
            if isinstance(request, Ask) and kept:
                request = replace(request, shared={**request.shared, **kept})
            answer = yield request
    except StopIteration as end:
        state: S = end.value
        return state
    finally:
        script.close()


def with_terms(inner: Algorithm[S], terms: Mapping[str, LocalTerm], model: Model, method: str) -> Algorithm[Any]:
    """The method with local terms, which its ingredients must have held; ``model`` is the experiment's model.

    Without terms it is ``inner`` itself. Raises ConfigurationError, which names ``method``, if its programs have not
    taken the terms, if devices do not train, or if a term needs ``algorithm.loss`` as a whole and finds another loss.
    """
    if not terms:
        return inner
    # Other programs ask devices for sums, and do not train.
    training = [program for program in inner.programs.values() if isinstance(program, LocalSGD)]
    able = bool(training) and getattr(inner, "takes_terms", True)
    if not able or not all(_has(program, *each) for program in training for each in terms.items()):
        raise ConfigurationError(
            f"the method {method!r} does not train devices by a loss that takes local terms; remove "
            f"{', '.join(f'algorithm.terms.{name}' for name in terms)}, or choose another method"
        )
    whole = all(isinstance(program.loss, Objective) for program in training)
    if needy := [name for name, term in terms.items() if term.otherwise and not whole]:
        raise ConfigurationError(
            f"the method {method!r} has a loss of its own, and algorithm.terms.{needy[0]} would take away a part of "
            f"algorithm.loss that is not in it; set {terms[needy[0]].otherwise}, or choose another method"
        )
    return WithTerms(inner, terms, model)


def _has(program: LocalSGD, name: str, term: LocalTerm) -> bool:
    """Whether a program minimises a loss that has the term ``name``."""
    return program.takes_terms and named(name, term) in getattr(program.loss, "terms", ())


def kept_at_first(algorithm: Algorithm[Any], variables: Tree) -> Forest:
    """Trees as they go with every ask after the first task, for the terms in the losses of ``algorithm``.

    They have the right names, shapes and types. The previous model is ``variables``, and importances are made up.
    """
    losses = [program.loss for program in algorithm.programs.values() if isinstance(program, LocalSGD)]
    terms = [term for loss in losses for term in getattr(loss, "terms", ()) if isinstance(term, NamedTerm)]
    kept: dict[str, Tree] = {PREVIOUS: variables} if any(term.previous for term in terms) else {}
    question = algorithm.programs.get(IMPORTANCE)
    if isinstance(question, AskImportance):
        answer = question.payload({"model": variables})
        kept |= {importance_key(name): answer[name] for name in question.measures}
    return kept
