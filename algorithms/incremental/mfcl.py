"""MFCL (Babakniya et al., "A Data-Free Approach to Mitigate Catastrophic Forgetting in Federated Class Incremental
Learning for Vision Tasks", NeurIPS 2023): a generator remembers the classes of earlier tasks.

This is algorithm 1. In the first task devices minimise cross-entropy. When another task begins, the coordinator trains
a generator against the global model, without data, and starts from the generator of the task before (equations 1 to 5,
``generator/training.py`` and ``generator/losses.py``). Then devices learn the new classes together with synthetic
samples of the old ones (equations 6 to 9, ``mfcl_local.py``). The model at the end of the last task and the generator
are sent once per task and machine. A device keeps nothing.

The generator is trained on the statistics of batch normalisation. For models without it, devices report running
statistics of their layers. Defaults are the paper's: weights 1, 75 and 0.001, 5,000 iterations, 32 synthetic samples a
step.

The authors' code differs from the text in these points:

- The generator's losses and their targets; see ``generator/training.py``.
- The code divides feature distillation by the number of old classes (``distillation_scale = "mean"``). Equation 8 is a
  sum (``"sum"``). The paper does not give the weights ``fine_tuning`` 1 and ``distillation`` 0.1. They are the code's,
  and belong to its mean: with the sum the weight of the term would grow with each task.
- The code averages models evenly (``weights = "even"``). Algorithm 1 says FedAvg.
- In the code the pass for fine-tuning goes through the model once more, so that running statistics move twice a step.
  Here they move once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from fedemu.algorithms.incremental.generator.samples import judgement, synthetic
from fedemu.algorithms.incremental.generator.training import Entropy, GeneratorSettings, GeneratorTraining, Targets
from fedemu.algorithms.incremental.mfcl_local import NOISE, RehearsingSGD, StableLoss, generated, stored
from fedemu.algorithms.incremental.remembering import (
    JUDGED,
    PREVIOUS,
    RememberingFedAvg,
    RememberingState,
    TaskSGD,
    classifier_of,
)
from fedemu.algorithms.interface import Context, Forest, Model, Reducer, Script, Tree, weighted_mean
from fedemu.algorithms.methods.fednova import AVERAGES, Weights
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.models.image_generator import EPSILON, NoiseSize, NormEpsilon, generator_for
from fedemu.algorithms.models.layer_statistics import unwatched, watched
from fedemu.algorithms.models.low_precision import precision_of
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import LossFunction, Objective
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError

GeneratorBatch = Annotated[int, Field(ge=2)]
"""The size of a generator's batch. It is at least 2, because a batch of one has no variance to normalise by."""
Weight = Annotated[float, Field(ge=0, le=1e6)]
Temperature = Annotated[float, Field(ge=1e-6, le=1e9)]
MOST_BYTES: Final = 2**32
"""The largest size, in bytes, of the synthetic samples that are made at once."""


class MFCL(RememberingFedAvg):
    """The rounds of a method that rehearses from a generator (MFCL, algorithm 1).

    If ``samples`` is above 0, devices are sent that number of synthetic samples of each class and not the generator;
    the samples are made once when a task begins (appendix D). With ``recall`` devices are sent the previous model;
    without it they are sent only which classes that model has seen.
    """

    def __init__(
        self,
        first: LocalSGD,
        later: LocalSGD,
        classifier: Growing,
        training: GeneratorTraining,
        samples: int,
        recall: bool,
        average: Reducer,
    ) -> None:
        super().__init__(first, later, classifier, average)
        self._training = training
        self._samples = samples
        self._recall = recall

    def remember(self, state: RememberingState, context: Context) -> Script[Forest]:
        start = state.kept.get("generator", {})
        generator = yield from self._training.train(state.variables, start, context)
        previous = unwatched(state.variables)
        noise = seeds.generator(context.seed, round=context.round, purpose="generator/judged")
        judged = judgement(self._training, generator, state.variables, noise)
        kept: dict[str, Tree] = {PREVIOUS: previous, "generator": generator, JUDGED: judged}
        if self._samples:
            draws = seeds.generator(context.seed, round=context.round, purpose="synthetic")
            kept["synthetic"] = synthetic(self._training, generator, self.classifier, previous, self._samples, draws)
        return kept

    def shared(self, kept: Forest) -> Forest:
        unsent = "generator" if self._samples else "synthetic"
        sent = {key: tree for key, tree in kept.items() if key not in (unsent, JUDGED)}
        return sent if self._recall else {**sent, PREVIOUS: {SEEN: kept[PREVIOUS][SEEN]}}

    def pictures(self, state: RememberingState, samples: int, seed: int) -> Tree:
        """Pictures of the classes of earlier tasks, ``samples`` of each class.

        With ``targets = "model"`` their labels are what the previous model takes them for.
        """
        if not state.kept:
            return {}
        generator, previous = state.kept["generator"], state.kept[PREVIOUS]
        draws = seeds.generator(seed, purpose="pictures")
        return synthetic(self._training, generator, self.classifier, previous, samples, draws)


def mfcl(
    ingredients: Ingredients,
    diversity: Weight = 1.0,
    batch_statistics: Weight = 75.0,
    image_prior: Weight = 0.001,
    noise: NoiseSize = 0,
    norm_epsilon: NormEpsilon = EPSILON,
    iterations: PositiveInt = 5000,
    generator_batch: GeneratorBatch = 128,
    generator_lr: PositiveFloat = 0.001,
    targets: Targets = "noise",
    class_signal: Weight = 0.0,
    temperature: Temperature = 1.0,
    entropy: Entropy = "classes",
    split: bool = True,
    fine_tuning: Weight = 1.0,
    distillation: Weight = 0.1,
    distillation_scale: Literal["sum", "mean"] = "mean",
    synthetic_batch: PositiveInt = 32,
    samples: NonNegativeInt = 0,
    weights: Weights = "examples",
) -> MFCL:
    """MFCL (Babakniya et al., 2023, algorithm 1).

    A weight of 0 leaves out its loss, and ``split = false`` lets all classes compete in the loss of new classes: these
    are the variants of table 5. ``noise`` 0 is the size with which the generator was published. ``norm_epsilon`` is the
    epsilon of batch normalisation in the generator's blocks. Raises ConfigurationError if the stream has no tasks, if
    there is no generator for images of this size, if the model has no statistics, if the noise has too few values, or
    if ``samples`` would take more than MOST_BYTES.
    """
    settings = GeneratorSettings(
        diversity=diversity,
        batch_statistics=batch_statistics,
        image_prior=image_prior,
        iterations=iterations,
        batch_size=generator_batch,
        lr=generator_lr,
        targets=targets,
        class_signal=class_signal,
        temperature=temperature,
        entropy=entropy,
    )

    def loss(model: Model, classifier: Growing) -> LossFunction:
        return StableLoss(model, classifier, synthetic_batch, split, fine_tuning, distillation, distillation_scale)

    return _rehearsing(
        "mfcl",
        ingredients,
        settings,
        noise=noise,
        norm_epsilon=norm_epsilon,
        synthetic_batch=synthetic_batch,
        samples=samples,
        average=AVERAGES[weights],
        loss=loss,
        taught=distillation > 0,
    )


def fedavg_gen(
    ingredients: Ingredients,
    diversity: Weight = 1.0,
    batch_statistics: Weight = 75.0,
    image_prior: Weight = 0.001,
    noise: NoiseSize = 0,
    norm_epsilon: NormEpsilon = EPSILON,
    iterations: PositiveInt = 5000,
    generator_batch: GeneratorBatch = 128,
    generator_lr: PositiveFloat = 0.001,
    targets: Targets = "noise",
    class_signal: Weight = 0.0,
    temperature: Temperature = 1.0,
    entropy: Entropy = "classes",
    synthetic_batch: PositiveInt = 32,
    samples: NonNegativeInt = 0,
) -> MFCL:
    """FedAvg + Gen (MFCL, table 5): MFCL's generator, whose samples devices use like real ones, without further terms.

    Options and errors are those of ``mfcl``.
    """
    settings = GeneratorSettings(
        diversity=diversity,
        batch_statistics=batch_statistics,
        image_prior=image_prior,
        iterations=iterations,
        batch_size=generator_batch,
        lr=generator_lr,
        targets=targets,
        class_signal=class_signal,
        temperature=temperature,
        entropy=entropy,
    )

    def loss(model: Model, classifier: Growing) -> LossFunction:
        return Objective(model)

    return _rehearsing(
        "fedavg_gen",
        ingredients,
        settings,
        noise=noise,
        norm_epsilon=norm_epsilon,
        synthetic_batch=synthetic_batch,
        samples=samples,
        average=weighted_mean,
        loss=loss,
        taught=False,
    )


def _rehearsing(
    method: str,
    ingredients: Ingredients,
    settings: GeneratorSettings,
    *,
    noise: int,
    norm_epsilon: float,
    synthetic_batch: int,
    samples: int,
    average: Reducer,
    loss: Callable[[Model, Growing], LossFunction],
    taught: bool,
) -> MFCL:
    """MFCL's rounds with the local loss that ``loss`` makes from the watched model and the classifier.

    ``taught`` says whether that loss asks the previous model. Errors are those of ``mfcl``.
    """
    classifier = classifier_of(ingredients, method)
    ingredients.require_cross_entropy(method)
    generator = generator_for(ingredients.input_shape, noise, norm_epsilon, precision_of(classifier))
    if settings.targets == "noise" and generator.noise < ingredients.classes:
        raise ConfigurationError(
            f"the first values of the generator's noise stand for the {ingredients.classes} classes, but there are "
            f"{generator.noise}; set algorithm.options.noise = {ingredients.classes} or more"
        )
    if settings.signal and generator.noise == ingredients.classes:
        raise ConfigurationError(
            f"algorithm.options.class_signal = {settings.signal:g} leaves nothing of {generator.noise} values of noise "
            f"beside {ingredients.classes} classes; set algorithm.options.noise to more, or class_signal = 0"
        )
    made = samples * ingredients.classes * math.prod(ingredients.input_shape) * 4
    if made > MOST_BYTES:
        raise ConfigurationError(
            f"algorithm.options.samples = {samples} of each class come to {made / 2**30:.1f} GiB, and more than "
            f"{MOST_BYTES / 2**30:.0f} GiB are never made at once; set a lower number, or 0 to send the generator"
        )
    model: Model = classifier
    observed = classifier
    if settings.batch_statistics:
        model = watched(classifier, ingredients.input_shape)
        observed = classifier.observed()
    training = GeneratorTraining(generator, observed, settings)
    ingredients = replace(ingredients, model=model)
    later = ingredients.training(
        RehearsingSGD,
        loss=loss(model, classifier),
        synthetic=stored if samples else generated(generator, classifier, settings.targets, settings.signal),
        synthetic_batch=synthetic_batch,
        kind=classifier.kind if samples else generator.kind,
        noise={NOISE: (synthetic_batch,) if samples else (synthetic_batch, generator.noise)},
    )
    recall = taught or (settings.targets == "model" and not samples)
    return MFCL(ingredients.training(TaskSGD), later, classifier, training, samples, recall, average)
