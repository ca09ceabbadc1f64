"""LANDER (Tran, Le, Le, Harandi and Phung, "Text-Enhanced Data-free Approach for Federated Class-Incremental Learning",
CVPR 2024): anchors of classes hold the features at devices, and lead a generator at the coordinator.

A linear layer maps the features to the space of the anchors (``anchors.py``). In the first task devices minimise

    CE + anchoring · L_B,

with ``L_B`` the ``bounding_loss`` of the mapped features from the anchors of their classes. From the second task on
they minimise (``lander_local.py``)

    current · (CE among the task's classes + anchoring · L_B)
      + previous · (KL(q_previous ‖ q) + mean (f - f_previous)²).

The last bracket is about synthetic samples: softmax at ``temperature`` over earlier classes, and mapped features. If
``known`` of ``total`` classes are of earlier tasks, then with a = log2(total / 2 + 1) and b = √(known / total)

    current := current · (1 + 1 / a) / b,    previous := previous · a · b.

The coordinator makes the samples (``synthesis.py``) from noisy anchors: in each round of synthesis new linear layers,
one for every 10 samples, turn the anchors of their classes into latents. These layers are trained together with the
generator, and with the mean and the deviation of the images' channels. The generator also minimises
``anchoring · L_B``, and the student learns the teacher's mapped features.

The paper's text was not at hand: formulas, weights and rates are those of its authors' public code for CIFAR-100.
Known differences:

- Anchors are orthonormal directions and no text embeddings, so similar classes have no nearer anchors than others. The
  scale of the authors' embeddings is not known; ``radius`` counts in squares of their values.
- The generator is MFCL's (``models/image_generator.py``), whose images have mean 0 and deviation 1 per channel. Theirs
  ends with a sigmoid. Anchors are standardised over a batch; theirs pass a trained batch normalisation.
- They crop and flip synthetic images at random. Here no image is changed, so the teacher's answers are computed once.
- A task ends with its last model. Theirs ends with the model of the round with the lowest training loss.
- Samples are kept with the trained mean and deviation of their channels. Theirs lead the generator only, and the kept
  images are normalised by those of the data.
- Samples are kept from round 11 on, and L_KL begins in round 12. Theirs begin in rounds 10 and 13.
- The student's rate is 0.05 and its momentum goes on from round to round. Theirs is 0.1, and the momentum begins anew.
- One step takes 32 synthetic samples; theirs takes as many as real ones. They average models evenly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor

from fedemu.algorithms.graphs.repeated import Constant
from fedemu.algorithms.incremental.data_free.anchors import ORTHONORMAL, Mapped, anchors_of
from fedemu.algorithms.incremental.data_free.lander_local import AnchoredDistillingLoss, AnchoredLoss
from fedemu.algorithms.incremental.data_free.losses import bounding_loss
from fedemu.algorithms.incremental.data_free.maker import Momentum, SynthesisSettings
from fedemu.algorithms.incremental.data_free.rehearsal import SampleRehearsal, programs
from fedemu.algorithms.incremental.data_free.synthesis import Synthesis
from fedemu.algorithms.incremental.mfcl import GeneratorBatch, Weight
from fedemu.algorithms.incremental.remembering import classifier_of
from fedemu.algorithms.interface import Forest, Outputs
from fedemu.algorithms.models.image_generator import Generator, NoiseSize, generator_for
from fedemu.algorithms.models.layer_statistics import watched
from fedemu.algorithms.models.low_precision import precision_of
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.trees import without

GROUP: Final = 10
"""The number of samples whose latents come from one noisy layer."""
STATISTICS_LR: Final = 0.01
"""The learning rate of the mean and the deviation of the images' channels."""


@dataclass(frozen=True, eq=False)
class NoisyAnchorMaker:
    """Images from noisy anchors ``[classes, width]``, by a generator that is kept from round to round."""

    generator: Generator
    anchors: Tensor
    lr: float
    anchoring: float
    radius: float

    @cached_property
    def _points(self) -> Constant:
        return Constant(self.anchors)

    @property
    def rates(self) -> Mapping[str, float]:
        return {"generator": self.lr, "weights": self.lr, "statistics": STATISTICS_LR}

    def begin(self, seed: int) -> Forest:
        channels = (1, self.generator.channels, 1, 1)
        statistics = {"mean": torch.zeros(channels), "deviation": torch.ones(channels)}
        return {"generator": self.generator.model.init(seed), "statistics": statistics}

    def opened(self, kept: Forest, rows: int, draws: np.random.Generator) -> Forest:
        layers, width = math.ceil(rows / GROUP), self.anchors.shape[1]
        noisy = torch.from_numpy(draws.standard_normal((layers, self.generator.noise, width), "float32"))
        weights = {"noisy": noisy, "bias": torch.zeros(layers, self.generator.noise)}
        trained = without(kept["generator"], self.generator.model.buffers)
        return {"generator": trained, "weights": weights, "statistics": kept["statistics"]}

    def images(self, kept: Forest, trained: Forest, y: Tensor) -> Tensor:
        variables = {**kept["generator"], **trained["generator"]}
        chosen = self._points.on(y.device)[y]
        even = (chosen - chosen.mean(0)) / (chosen.var(0, correction=0) + 1e-5).sqrt()
        layers = zip(torch.split(even, GROUP), trained["weights"]["noisy"], trained["weights"]["bias"], strict=True)
        z = torch.cat([part @ weight.t() + bias for part, weight, bias in layers])
        images = self.generator.model.apply(variables, z, True)[0].logits
        return images * trained["statistics"]["deviation"] + trained["statistics"]["mean"]

    def losses(self, outputs: Outputs, y: Tensor) -> Mapping[str, Tensor]:
        if not self.anchoring:
            return {}
        bound = bounding_loss(outputs.features, self._points.on(y.device)[y], self.radius)
        return {"anchoring": self.anchoring * bound}

    def lesson(self, student: Outputs, features: Tensor) -> Tensor | None:
        return self.anchoring * (student.features - features).square().mean() if self.anchoring else None

    def closed(self, kept: Forest, trained: Forest, slopes: Forest) -> Forest:
        generator = {**kept["generator"], **trained["generator"]}
        return {"generator": generator, "statistics": trained["statistics"]}


def lander(
    ingredients: Ingredients,
    anchors: str = ORTHONORMAL,
    anchor_width: PositiveInt = 512,
    anchor_scale: PositiveFloat = 0.45,
    anchoring: Weight = 5.0,
    radius: NonNegativeFloat = 0.015,
    current: Weight = 0.2,
    previous: Weight = 0.4,
    temperature: PositiveFloat = 2.0,
    synthetic_batch: PositiveInt = 32,
    synthesis_rounds: PositiveInt = 50,
    warm_up: NonNegativeInt = 10,
    synthesis_steps: PositiveInt = 40,
    generator_batch: GeneratorBatch = 256,
    noise: NoiseSize = 256,
    generator_lr: PositiveFloat = 0.002,
    cross_entropy: Weight = 0.5,
    batch_statistics: Weight = 1.0,
    divergence: Weight = 1.0,
    statistics_momentum: Momentum = 0.9,
    student_steps: PositiveInt = 50,
    student_batch: GeneratorBatch = 128,
    student_lr: PositiveFloat = 0.05,
    student_decay: NonNegativeFloat = 0.0002,
    student_temperature: PositiveFloat = 20.0,
) -> SampleRehearsal:
    """LANDER (Tran et al., 2024): features near anchors, and samples that are made from noisy anchors.

    ``anchors`` is ``orthonormal`` or a function ``module:Name`` of (classes, anchor_width). The samples of the first
    ``warm_up`` rounds of synthesis are not kept. A weight of 0 leaves out its loss. Raises ConfigurationError if
    the stream has no tasks, if there is no generator for images of this size, if the model has no statistics, if
    ``warm_up`` is not below ``synthesis_rounds``, if the anchors do not fit, or if ``synthetic_batch`` is 1 although
    the model has batch normalisation.
    """
    classifier = classifier_of(ingredients, "lander")
    ingredients.require_cross_entropy("lander")
    shape = ingredients.input_shape
    generator = generator_for(shape, noise, precision=precision_of(classifier))
    settings = SynthesisSettings(
        rounds=synthesis_rounds,
        warm_up=warm_up,
        steps=synthesis_steps,
        batch_size=generator_batch,
        cross_entropy=cross_entropy,
        batch_statistics=batch_statistics,
        divergence=divergence,
        statistics_momentum=statistics_momentum,
        student_steps=student_steps,
        student_batch=student_batch,
        student_lr=student_lr,
        student_decay=student_decay,
        temperature=student_temperature,
        keep_all=False,
    )
    points = anchors_of(anchors, ingredients.classes, anchor_width, anchor_scale)
    features = classifier.init(0)[classifier.head.weight].shape[1]
    model = Mapped(watched(classifier, shape) if batch_statistics else classifier, features, anchor_width)
    observed = Mapped(classifier.observed() if batch_statistics else classifier, features, anchor_width)
    maker = NoisyAnchorMaker(generator, points, generator_lr, anchoring, radius)
    synthesis = Synthesis(maker, observed, settings)
    first = AnchoredLoss(model, points, anchoring, radius)
    later = AnchoredDistillingLoss(
        model, points, anchoring, radius, classifier, synthetic_batch, current, previous, temperature
    )
    train, rehearse = programs(ingredients, model, settings, synthetic_batch, first, later)
    return SampleRehearsal(train, rehearse, classifier, synthesis, shape, ("logits", "features"))
