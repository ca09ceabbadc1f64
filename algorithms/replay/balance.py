"""FedCBDR's selection: the fleet keeps equally many samples of each class, and in a class those of high leverage.

Qi et al., "Class-wise Balancing Data Replay for Federated Class-Incremental Learning", 2025, section 4.1. Before a
selection there are two questions:

1. ``feature_moments``: a device answers with ``XᵀX`` of the features of its samples. The coordinator adds them up.
2. ``leverage_keys``: a device finds the leverage scores of its samples with the fleet's moments, and draws a random key
   for each (``keys_of_a_draw``). It answers with the largest keys of each class.

The coordinator then tells each device how many samples of each class it keeps (``balanced_counts``).

In the paper devices send ``P X Q``, their features behind random orthogonal matrices, and the coordinator finds U. The
matrices cancel out, and the scores follow from ``XᵀX`` alone. So devices send its sum: it is smaller than the features,
and has no row per sample. ``docs/methods/replay.md`` tells what else is our reading.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.interface import (
    Ask,
    Context,
    Facts,
    Forest,
    Memory,
    Outcome,
    Query,
    Reply,
    Tree,
    collect,
    total,
)
from fedemu.algorithms.replay.exchange import EACH, Settled, is_of
from fedemu.algorithms.replay.lens import Lens
from fedemu.algorithms.replay.queries import Select
from fedemu.algorithms.replay.selection.by_class import class_quotas
from fedemu.algorithms.replay.selection.candidates import Floats, Positions
from fedemu.algorithms.replay.selection.leverage import (
    balanced_counts,
    keys_of_a_draw,
    largest_by_class,
    leverage_scores,
)
from fedemu.algorithms.trees import SUM_UNIT, scale
from fedemu.protocol import seeds

MOMENTS: Final = "feature_moments"
KEYS: Final = "leverage_keys"
_FEATURES, _KEYS, _COUNTS = "features", "keys", "counts"


@dataclass(frozen=True, eq=False)
class FeatureMoments:
    """A device answers with ``XᵀX [width, width]`` of the features of its buffer and of the period.

    It is float64, and in ``SUM_UNIT``.
    """

    lens: Lens
    width: int
    passes: float = 1.0
    declares_label_counts: bool = False

    def payload(self, shared: Forest) -> Forest:
        return {MOMENTS: {_FEATURES: torch.zeros(self.width, self.width, dtype=torch.float64)}}

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        features = self.lens.features(memory, shared)
        moments = features.T @ features if len(features) else np.zeros((self.width, self.width))
        return Outcome({MOMENTS: {_FEATURES: torch.from_numpy(moments / SUM_UNIT)}}, {}), None


@dataclass(frozen=True, eq=False)
class LeverageKeys:
    """A device answers with the ``room`` largest keys of each class, ``[classes, room]``, and remembers all its keys.

    ``room`` is the largest number of samples that a device may keep.
    """

    lens: Lens
    classes: int
    room: int
    passes: float = 1.0
    declares_label_counts: bool = False

    def payload(self, shared: Forest) -> Forest:
        return {KEYS: {_KEYS: torch.zeros(self.classes, self.room, dtype=torch.float64)}}

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        features = self.lens.features(memory, shared)
        scores = leverage_scores(features, shared[MOMENTS][_FEATURES].cpu().numpy())
        keys = keys_of_a_draw(scores, memory.generator)
        table = largest_by_class(keys, memory.batch.y.cpu().numpy(), self.classes, self.room)
        return Outcome({KEYS: {_KEYS: torch.from_numpy(table)}}, {_KEYS: torch.from_numpy(keys)}), None


@dataclass(frozen=True, eq=False)
class BalancedSelect(Select):
    """A device keeps as many samples of each class as it was told, those with the largest keys.

    A device that has keys but was told no numbers, because it came back after the exchange, balances its own classes
    and keeps ``budget`` samples. One without keys does so by the leverage in its own samples alone. Samples that
    arrived after the keys were drawn have the key 0.
    """

    classes: int = 0
    budget: int = 0

    def choose(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> Positions:
        labels = memory.batch.y.cpu().numpy()
        if _KEYS in own:
            keys = np.zeros(len(labels))
            keys[: len(own[_KEYS])] = own[_KEYS].cpu().numpy()
        else:
            features = self.lens.features(memory, shared)
            keys = keys_of_a_draw(leverage_scores(features, features.T @ features), memory.generator)
        told = EACH in shared and _KEYS in own and is_of(memory, shared)
        if told:
            counts = shared[EACH][_COUNTS].cpu().numpy()
        else:
            held = np.bincount(labels, minlength=self.classes)
            counts = class_quotas(held, min(self.budget, memory.budget), memory.generator)
        chosen = [_largest(keys, np.flatnonzero(labels == label), int(counts[label])) for label in np.unique(labels)]
        return np.sort(np.concatenate(chosen)) if chosen else np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class BalanceExchange:
    """The two questions, and the numbers of samples. The fleet keeps ``budget`` samples for each device that answered.

    No device keeps more than ``room``.
    """

    lens: Lens
    width: int
    classes: int
    budget: int
    room: int

    @property
    def programs(self) -> Mapping[str, Query]:
        return {
            MOMENTS: FeatureMoments(self.lens, self.width),
            KEYS: LeverageKeys(self.lens, self.classes, self.room),
        }

    def play(self, shared: Forest, context: Context) -> Generator[Ask, Reply, Settled]:
        reply = yield Ask(MOMENTS, shared, {MOMENTS: total}, "online", optional=True)
        if not reply.devices:
            return Settled({}, None, {"balance": {"devices": 0}})
        moments = scale(reply.values[MOMENTS], SUM_UNIT)
        reply = yield Ask(KEYS, {**shared, MOMENTS: moments}, {KEYS: collect}, "online", optional=True)
        handles = reply.values[KEYS] if reply.devices else []
        tables = [handle.load()[_KEYS].numpy() for handle in handles]
        generator = seeds.generator(context.seed, round=context.round, purpose="replay/balance")
        counts = balanced_counts(
            np.array(tables).reshape(len(tables), self.classes, self.room),
            np.full(len(tables), self.room),
            self.budget * len(tables),
            generator,
        )
        each = {handle.device: {_COUNTS: torch.from_numpy(own)} for handle, own in zip(handles, counts, strict=True)}
        return Settled({}, each or None, {"balance": {"devices": len(handles), "labels": counts.sum(axis=0).tolist()}})


def _largest(keys: Floats, members: Positions, count: int) -> Positions:
    """The ``count`` members with the largest keys, the first among equals."""
    return members[np.argsort(-keys[members], kind="stable")[:count]]
