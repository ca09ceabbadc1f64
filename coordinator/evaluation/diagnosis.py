"""The diagnosis of a round: what every device's model forgets, and what the new global model forgets.

The diagnosis is a measurement of the emulation, made at the coordinator. No device is asked for anything, and nothing
that the run computes depends on it. ``docs/run_directory.md`` lists the keys of a line of ``diagnosis.jsonl``.
``algorithms/measures/forgetting.py`` defines the measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.interface import Forest, Model, Revealing, Tree
from fedemu.algorithms.measures import forgetting
from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.algorithms.trees import add, map_leaves, squared_norm, unflatten, without
from fedemu.coordinator.asks.payload import Payload
from fedemu.coordinator.asks.tensors import as_tensor
from fedemu.coordinator.evaluation.alignment import Preferences, alignment
from fedemu.coordinator.evaluation.evaluate import Evaluation, Evaluator, mean_by
from fedemu.protocol.ids import DeviceId

Floats = NDArray[np.float64]


class Diagnosis:
    """What all diagnoses of an experiment share.

    ``evaluator`` tests models. ``partition`` says which samples each device holds, and ``stream`` when they arrive;
    without a stream, devices hold them from the beginning on.
    """

    def __init__(
        self,
        model: Model,
        corpus: Corpus,
        partition: Partition,
        evaluator: Evaluator,
        stream: StreamPlan | None = None,
    ) -> None:
        self.evaluator = evaluator
        self.buffers = model.buffers
        self.validates = len(partition.validation_indices) > 0
        """Whether devices keep validation parts."""
        self._corpus = corpus
        self._partition = partition
        self._stream = stream

    def open(self, round: int, before: Tree) -> RoundDiagnosis:
        """The diagnosis of a round that begins with the global model ``before``."""
        return RoundDiagnosis(self, round, before)

    def test(self, variables: Tree) -> tuple[Evaluation, Preferences]:
        """The results of a model on the test samples, and which classes its neurons prefer."""
        preferences = Preferences(self._corpus.classes)
        return self.evaluator.evaluate(variables, watch=preferences.watch), preferences

    def label_counts(self, devices: Sequence[DeviceId], round: int) -> NDArray[np.int64]:
        """Counts ``[devices, classes]`` of the training samples that arrive at the devices in the round's period."""
        if self._stream is None:
            held = [self._partition.device(device)[0] for device in devices]
        else:
            held = [self._stream.held(device, round, math.inf) for device in devices]
        labels, classes = self._corpus.train.y, self._corpus.classes
        return np.stack([np.bincount(labels[indices], minlength=classes) for indices in held])

    def validate(self, variables: Tree, devices: Sequence[DeviceId]) -> Floats:
        """The model's accuracy on each device's validation part, ``[devices]``. NaN for an empty part."""
        parts = [self._partition.device(device)[1] for device in devices]
        groups = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        return mean_by(groups, self.evaluator.answers(variables, np.concatenate(parts)).hits, len(parts))


@dataclass
class _Locals:
    """The results for the devices' models that have been examined so far, in the order of ``devices``.

    A move is the difference of a model from the one that the device was sent. Only the norms and the sum of the moves
    are kept.
    """

    devices: tuple[DeviceId, ...]
    evaluations: list[Evaluation] = field(default_factory=list)
    preferences: list[Preferences] = field(default_factory=list)
    validations: list[Floats] = field(default_factory=list)
    squared_norms: list[float] = field(default_factory=list)
    moves: Tree = field(default_factory=dict)


class RoundDiagnosis:
    """Examines a round's models one after another. Only their results are kept, not the models."""

    def __init__(self, basis: Diagnosis, round: int, before: Tree) -> None:
        self._basis = basis
        self._round = round
        self._before = before
        self._locals: _Locals | None = None

    def begin(self, devices: Sequence[DeviceId]) -> None:
        """The models of these devices come next. Results of an earlier ask of the round are dropped."""
        self._locals = _Locals(tuple(devices))

    def examine(self, program: Revealing, shared: Forest, payload: Payload) -> None:
        """Examine the next device's model, which is made from what the device was sent and what it replied."""
        replied = {name: as_tensor(array, payload.leaves[name]) for name, array in payload.load().items()}
        model = program.local_model(shared, unflatten(replied))
        found, basis = self._locals, self._basis
        assert found is not None
        evaluation, preferences = basis.test(model)
        found.evaluations.append(evaluation)
        found.preferences.append(preferences)
        if basis.validates:
            found.validations.append(basis.validate(model, found.devices))
        move = map_leaves(lambda before, after: after.double() - before.double(), self._sent(shared), model)
        found.squared_norms.append(float(squared_norm(move)))
        found.moves = add(found.moves, move) if found.moves else move

    def _sent(self, shared: Forest) -> Tree:
        """The trained variables with which devices began.

        They differ from those of the global model if a task begins, whose rows of the classifier have been drawn since,
        and if a method tests another classifier than it trains.
        """
        sent = shared.get("model", {})
        trained = without(self._before, self._basis.buffers)
        return {name: sent.get(name, leaf) for name, leaf in trained.items()}

    def conclude(self, after: Tree) -> dict[str, Any] | None:
        """The round's line of ``diagnosis.jsonl``. ``after`` is the new global model. None if no model was examined."""
        found = self._locals
        if found is None or not found.devices:
            return None
        before, preferred_before = self._basis.test(self._before)
        following, preferred_after = self._basis.test(after)
        counts = self._basis.label_counts(found.devices, self._round)
        of_mean_move = float(squared_norm(found.moves)) / len(found.devices) ** 2
        return {
            "round": self._round,
            "devices": found.devices,
            "label_counts": counts,
            "samples": len(self._basis.evaluator),
            **_tested(before, found.evaluations, following, counts),
            **alignment(preferred_before, found.preferences, preferred_after, self._before.get(SEEN)),
            "validation": self._validation(found) if self._basis.validates else None,
            "gradient_diversity": forgetting.diversity_of_norms(found.squared_norms, of_mean_move),
            "weight_divergence": np.sqrt(found.squared_norms),
        }

    def _validation(self, found: _Locals) -> dict[str, Any]:
        """The results on the devices' validation parts (WSM, equations 5 and 6)."""
        whole = self._basis.validate(self._before, found.devices)
        lost = forgetting.local_forgetting(whole, np.stack(found.validations))
        return {
            "global_accuracy": whole,
            "local_accuracy": found.validations,
            "forgetting": lost,
            "mean_forgetting": float(forgetting.mean_known(forgetting.mean_local_forgetting(lost))),
        }


def _tested(
    before: Evaluation, evaluations: Sequence[Evaluation], after: Evaluation, label_counts: NDArray[np.int64]
) -> dict[str, Any]:
    """The results of all models on the same test samples: by class, in-local and out-local."""
    here, elsewhere = forgetting.in_local(label_counts), forgetting.out_local(label_counts)
    over = forgetting.over_distribution
    accuracy = np.array([evaluation.class_accuracy for evaluation in evaluations])
    loss = np.array([evaluation.class_loss for evaluation in evaluations])
    return {
        "before": _figures(before),
        "locals": {
            "accuracy": [evaluation.accuracy for evaluation in evaluations],
            "loss": [evaluation.loss for evaluation in evaluations],
            "class_accuracy": accuracy,
            "class_loss": loss,
            "in_local": over(accuracy, here),
            "out_local": over(accuracy, elsewhere),
            "in_local_loss": over(loss, here),
            "out_local_loss": over(loss, elsewhere),
        },
        "before_in_local": over(before.class_accuracy, here),
        "before_out_local": over(before.class_accuracy, elsewhere),
        "after": _figures(after),
        "after_in_local": over(after.class_accuracy, here),
        "after_out_local": over(after.class_accuracy, elsewhere),
        "local_forgetting": float(np.mean(forgetting.accuracy_lost(before.class_accuracy, accuracy))),
        "aggregation_forgetting": float(np.mean(forgetting.accuracy_lost(accuracy, after.class_accuracy))),
        "round_forgetting": float(forgetting.accuracy_lost(before.class_accuracy, after.class_accuracy)),
    }


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    """The results of a global model."""
    return {name: getattr(evaluation, name) for name in ("accuracy", "loss", "class_accuracy", "class_loss")}
