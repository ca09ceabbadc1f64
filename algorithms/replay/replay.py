"""Replay as an algorithm around any method: at the end of every period devices choose which of its samples they keep.

After a period's last round the devices that are on-line are asked to select. If they select together, an exchange comes
first (``coordination.py``, ``balance.py``). Its traffic and its time belong to that round. Devices that are away select
later and alone, as ``Selecting`` in the interface says. How devices train on what they keep is not decided here.

Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning", 2023, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from fedemu.algorithms.interface import (
    Algorithm,
    Around,
    Ask,
    Context,
    Forest,
    Query,
    Reply,
    Script,
    Selecting,
    Tree,
    total,
)
from fedemu.algorithms.replay.balance import BalancedSelect, BalanceExchange
from fedemu.algorithms.replay.coordination import CoordinatedSelect, GradientExchange, GradientSum, fleet_objective
from fedemu.algorithms.replay.exchange import Exchange, Settled, marked
from fedemu.algorithms.replay.lens import Lens
from fedemu.algorithms.replay.notes import NotingLogits
from fedemu.algorithms.replay.queries import CENSUS, KEPT, MODEL, Census, Select
from fedemu.algorithms.replay.selection.at_random import fixed_proportion
from fedemu.algorithms.replay.selection.candidates import Strategy
from fedemu.algorithms.replay.selection.diversity import gradient_diversity
from fedemu.algorithms.replay.selection.selection import STRATEGIES
from fedemu.algorithms.replay.settings import BALANCED, COORDINATED, OWN, ReplaySettings
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.protocol.errors import ConfigurationError

SELECT: Final = "select"
"""The name of the program by which devices select."""
NEEDS_LABELS: Final = ("class_balanced", "herding", BALANCED)
"""The strategies that need the labels of samples."""
NEEDS_FEATURES: Final = ("herding", BALANCED)
"""The strategies that need the features of samples."""
COMPUTES_GRADIENTS: Final = ("gss_greedy", "gss_cluster", "gss_iqp", "diversity_convex", "diversity", COORDINATED)
"""The strategies that compute the gradients of samples."""
LOOKS_AT_MODEL: Final = (*NEEDS_FEATURES, *COMPUTES_GRADIENTS)
"""The strategies that need the global model, for the features or the gradients of samples."""

S = TypeVar("S")


@dataclass(frozen=True)
class ReplayState(Generic[S]):
    """The state of the inner method, and the remarks of the last round about selection."""

    inner: S
    remarks: Mapping[str, Any]


class Replay(Around[S]):
    """The rounds of the method ``inner``, with a selection of samples after the last round of a period.

    ``exchange`` comes before a selection; it is None if each device selects alone. Raises ConfigurationError if a
    program of ``inner`` has the name of one of replay's programs.
    """

    def __init__(
        self, inner: Algorithm[S], settings: ReplaySettings, select: Select, exchange: Exchange | None
    ) -> None:
        selection: Query = NotingLogits(select, select.lens) if settings.logits else select
        before = {} if exchange is None else exchange.programs
        super().__init__(inner, {SELECT: selection, **before}, "replay has")
        self.selection = selection
        """The program by which a device selects, also when it selects late and alone."""
        self._settings = settings
        self._select = select
        self._before = exchange

    def init(self, variables: Tree, context: Context) -> ReplayState[S]:
        return ReplayState(self._inner.init(variables, context), {})

    def round(self, state: ReplayState[S], context: Context) -> Script[ReplayState[S]]:
        inner = yield from self._inner.round(state.inner, context)
        if not context.task_ends:
            return ReplayState(inner, {})
        remarks = yield from self._exchange(self._inner.variables(inner), context)
        return ReplayState(inner, remarks)

    def remarks(self, state: ReplayState[S]) -> Mapping[str, Any]:
        """The remarks of ``inner``. After a period's end also ``replay``, and those of the exchange before it."""
        return {**super().remarks(state), **state.remarks}

    def _exchange(self, variables: Tree, context: Context) -> Generator[Any, Any, dict[str, Any]]:
        """Let devices select at the end of a period, after an exchange if they do so together. Returns the remarks."""
        seen = _needs_model(self._settings) or KEPT in self._select.measured
        shared: Forest = {MODEL: variables} if seen else {}
        reduce = {CENSUS: total, KEPT: total} if KEPT in self._select.measured else {CENSUS: total}
        settled = Settled({}, None, {})
        if self._before is not None:
            shared = {**shared, **marked(context.task)}
            settled = yield from self._before.play(shared, context)
        ask = Ask(SELECT, {**shared, **settled.shared}, reduce, "online", settled.each, optional=True)
        kept = yield from self._selected(ask, context)
        return {"replay": kept, **settled.remarks}

    def _selected(self, ask: Ask, context: Context) -> Generator[Any, Any, dict[str, Any]]:
        """How many samples the devices that are on-line keep, in all and by label and period, and their objective."""
        reply: Reply = yield ask
        census = reply.values[CENSUS] if reply.devices else self._select.census.zero()
        counts = {name: leaf.tolist() for name, leaf in census.items()}
        (samples,) = counts.pop("samples")
        measured = {}
        if KEPT in ask.reduce:
            measured["objective"] = fleet_objective(reply.values[KEPT] if reply.devices else {})
        return {"period": context.task, "devices": len(reply.devices), "samples": samples, **measured, **counts}


def with_replay(inner: Algorithm[S], settings: ReplaySettings, ingredients: Ingredients) -> Algorithm[Any]:
    """The method with replay buffers, as an algorithm that is Selecting and Remarking.

    With the strategies ``none`` and ``own`` it is ``inner`` itself. Raises ConfigurationError if the strategy needs
    labels or features that the data or the model do not have, or gradients that the method's ``variables`` do not give
    (``shows_what_it_trains``); if the strategy is ``own``, and ``inner`` has no selection or a term needs logits, which
    nobody notes then; and if ``inner`` has a selection, and the strategy is another one.
    """
    strategy = settings.strategy
    if strategy == "none":
        return inner
    if strategy == OWN:
        _require_own_selection(inner, settings)
        return inner
    if isinstance(inner, Selecting):
        raise ConfigurationError(
            f"replay.strategy = {strategy!r} does not go with a method that has a 'selection' of its own; "
            f"set replay.strategy = {OWN!r}"
        )
    if strategy in NEEDS_LABELS and not ingredients.labelled:
        raise ConfigurationError(
            f"replay.strategy = {strategy!r} needs labels, which these data do not have; choose another strategy"
        )
    measured = _measured(settings)
    if not getattr(inner, "shows_what_it_trains", True) and (measured or strategy in COMPUTES_GRADIENTS):
        computes = strategy in COMPUTES_GRADIENTS
        asked = f"replay.strategy = {strategy!r}" if computes else f"replay.objective = {settings.objective!r}"
        instead = "replay.strategy = 'herding'" if computes else "replay.objective = 'cheap'"
        raise ConfigurationError(
            f"{asked} needs gradients of samples, but this method answers with a classifier that is not trained; "
            f"set {instead}"
        )
    if strategy in NEEDS_FEATURES:
        ingredients.require_features(strategy, "strategy")
    lens = Lens(ingredients.model, ingredients.criterion, settings.memory)
    labels = ingredients.classes if ingredients.labelled and settings.census else 0
    census = Census(labels, settings.periods if settings.census else 0)
    alone, labelled = _strategy(settings), ingredients.labelled
    passes = 1.0 if strategy in LOOKS_AT_MODEL else 0.0
    if strategy == BALANCED:
        classes, budget = ingredients.classes, settings.budget
        width = ingredients.feature_width()
        balanced = BalancedSelect(
            lens, alone, census, labelled, passes, measured=measured, classes=classes, budget=budget
        )
        room = max(settings.capacity, budget)
        return Replay(inner, settings, balanced, BalanceExchange(lens, width, classes, budget, room))
    if strategy != COORDINATED:
        return Replay(inner, settings, Select(lens, alone, census, labelled, passes, measured=measured), None)
    select = CoordinatedSelect(
        lens,
        alone,
        census,
        labelled,
        measured=measured,
        zero_diagonal=settings.final == "zero_diagonal",
        restarts=settings.restarts,
    )
    exchange = GradientExchange(GradientSum(lens, settings.targets), settings.iterations)
    return Replay(inner, settings, select, exchange)


def _require_own_selection(inner: Algorithm[Any], settings: ReplaySettings) -> None:
    if not isinstance(inner, Selecting):
        raise ConfigurationError(
            f"replay.strategy = {OWN!r} lets the method choose what devices keep, but this method has no 'selection'; "
            "choose another strategy"
        )
    if settings.logits:
        raise ConfigurationError(
            f"replay.strategy = {OWN!r} does not note the logits of samples, which algorithm.terms.der "
            "learns from; remove the term, or choose another strategy"
        )


def _measured(settings: ReplaySettings) -> frozenset[str]:
    """The keys of what measures the objective of the kept samples. The model is one if only the measure needs it."""
    if settings.objective == "never" or (settings.objective == "cheap" and settings.strategy not in COMPUTES_GRADIENTS):
        return frozenset()
    return frozenset({KEPT} if _needs_model(settings) else {KEPT, MODEL})


def _needs_model(settings: ReplaySettings) -> bool:
    """Whether devices need the global model to select, or to note the logits of what they keep."""
    return settings.strategy in LOOKS_AT_MODEL or settings.logits


def _strategy(settings: ReplaySettings) -> Strategy:
    match settings.strategy:
        case "fixed_proportion":
            return fixed_proportion(settings.proportion)
        case "diversity":
            return gradient_diversity(restarts=settings.restarts)
        case strategy if strategy == COORDINATED:
            zero_diagonal = settings.final == "zero_diagonal"
            return gradient_diversity(zero_diagonal, settings.restarts if zero_diagonal else 0)
        case strategy if strategy == BALANCED:
            return STRATEGIES["class_balanced"]
    return STRATEGIES[settings.strategy]
