"""Rounds of a method whose devices rehearse from synthetic samples, with the answers of the last task's model to them.

When a task begins, the coordinator makes the samples (``synthesis.py``). They are sent once per task and machine,
together with the model's answers, so a device needs neither that model nor a generator, and keeps nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fedemu.algorithms.incremental.data_free.maker import SynthesisSettings
from fedemu.algorithms.incremental.data_free.synthesis import Synthesis
from fedemu.algorithms.incremental.mfcl import MOST_BYTES
from fedemu.algorithms.incremental.mfcl_local import NOISE, RehearsingSGD, stored
from fedemu.algorithms.incremental.remembering import (
    JUDGED,
    PREVIOUS,
    RememberingFedAvg,
    RememberingState,
    TaskSGD,
)
from fedemu.algorithms.interface import Batch, Context, Forest, Model, Script, Tree
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.training.ingredients import Ingredients, require_variance
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import LossFunction
from fedemu.algorithms.trees import unflatten
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError


class SampleRehearsal(RememberingFedAvg):
    """Federated averaging with synthetic samples. ``shape`` is the shape of one sample.

    ``answers`` are the kinds of answers that devices get with the samples: ``logits``, ``features``.
    """

    def __init__(
        self,
        first: LocalSGD,
        later: LocalSGD,
        classifier: Growing,
        synthesis: Synthesis,
        shape: tuple[int, ...],
        answers: tuple[str, ...],
    ) -> None:
        super().__init__(first, later, classifier)
        self._synthesis, self._shape, self._answers = synthesis, shape, answers

    def remember(self, state: RememberingState, context: Context) -> Script[Forest]:
        carry: Tree = yield self._synthesis.job(state.variables, self._shape, context)
        forest = unflatten(carry)
        seen = {SEEN: state.variables[SEEN]}
        return {PREVIOUS: seen, "synthetic": forest["pool"], JUDGED: forest.get("judged", {})}

    def shared(self, kept: Forest) -> Forest:
        pool = kept["synthetic"]
        return {PREVIOUS: kept[PREVIOUS], "synthetic": {name: pool[name] for name in ("x", *self._answers)}}

    def pictures(self, state: RememberingState, samples: int, seed: int) -> Tree:
        """Pictures of the classes of earlier tasks, ``samples`` of each class, drawn from those that devices get.

        A class that none of these shows has no pictures.
        """
        if not state.kept:
            return {}
        pool, draws = state.kept["synthetic"], seeds.generator(seed, purpose="pictures")
        found = [(pool["y"] == label).nonzero()[:, 0].numpy() for label in state.kept[PREVIOUS][SEEN].nonzero()[:, 0]]
        of_class = [some for some in found if len(some)]
        if not of_class:
            return {}
        rows = torch.from_numpy(draws.permuted([draws.choice(some, samples) for some in of_class], axis=1).T.ravel())
        return {"x": pool["x"][rows], "y": pool["y"][rows]}


def programs(
    ingredients: Ingredients,
    model: Model,
    settings: SynthesisSettings,
    synthetic_batch: int,
    first: LossFunction,
    later: LossFunction,
) -> tuple[TaskSGD, RehearsingSGD]:
    """The programs of the first task and of all others, which minimise ``first`` and ``later`` for ``model``.

    Raises ConfigurationError if the samples would take too much memory, if the student would never be trained, or if a
    single synthetic sample goes through batch normalisation by itself.
    """
    require_variance(model, "algorithm.options.synthetic_batch", synthetic_batch)
    if settings.warm_up >= settings.rounds:
        raise ConfigurationError(
            f"algorithm.options.warm_up = {settings.warm_up} leaves no round of {settings.rounds} in which the student "
            "is trained; set it below algorithm.options.synthesis_rounds"
        )
    made = settings.samples * math.prod(ingredients.input_shape) * 4
    if made > MOST_BYTES:
        raise ConfigurationError(
            f"{settings.samples:,} synthetic samples come to {made / 2**30:.1f} GiB, and more than "
            f"{MOST_BYTES / 2**30:.0f} GiB are never made; set a lower algorithm.options.synthesis_rounds"
        )
    ingredients = replace(ingredients, model=model)
    rehearsing = ingredients.training(
        RehearsingSGD,
        loss=later,
        synthetic=with_its_row,
        synthetic_batch=synthetic_batch,
        kind=model.kind,
        noise={NOISE: (synthetic_batch,)},
    )
    return ingredients.training(TaskSGD, loss=first), rehearsing


def with_its_row(shared: Forest, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Samples from ``shared["synthetic"]``, as ``stored`` draws them, with their rows in it in place of classes.

    By its row the loss finds the model's answers to a sample.
    """
    x = shared["synthetic"]["x"]
    return stored({"synthetic": {"x": x, "y": torch.arange(len(x), device=noise.device)}}, noise)


def parted(batch: Batch, synthetic_batch: int) -> tuple[Batch, Batch]:
    """The real rows of a batch, and the ``synthetic_batch`` rows at its end."""
    rows = len(batch.y) - synthetic_batch
    first, last = (Batch(batch.x[part], batch.y[part], batch.weight[part]) for part in (slice(rows), slice(rows, None)))
    return first, last
