"""FedCIL at the devices (Qi, Zhao and Li, 2023): they train an AC-GAN, and replay from the generator of earlier tasks.

An auxiliary-classifier GAN (AC-GAN; Odena, Olah and Shlens, "Conditional Image Synthesis with Auxiliary Classifier
GANs", ICML 2017, equations 2 and 3) has two networks. The discriminator is the classifier with a second head, which
tells real samples from made ones. The generator makes images from noise and a class. All variables that the classifier
does not have are stored beside its own, under ``gan.``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.incremental.remembering import TaskSGD
from fedemu.algorithms.interface import Batch, Facts, Forest, Kind, Outcome, Outputs, Tree
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.models.image_generator import Generator
from fedemu.algorithms.models.layers import Linear
from fedemu.algorithms.training.adam import Adam
from fedemu.algorithms.training.local_sgd import Training
from fedemu.algorithms.training.losses import true_class
from fedemu.algorithms.trees import without
from fedemu.protocol import seeds

GAN: Final = "gan."
"""The beginning of the names of all variables that the classifier alone does not have."""
GENERATOR: Final = "gan.generator."
"""The beginning of the names of the generator's variables."""
SOURCE: Final = "gan.source"
"""The head that tells real samples from made ones: ``gan.source.weight [1, width]``, ``gan.source.bias [1]``."""
FAKE, FAKE_CLASSES, OLD, OLD_CLASSES = "fake", "fake_classes", "old", "old_classes"
"""Names of noise. Samples are made from ``fake`` and ``old``; the largest value of the other two is their class."""


@dataclass(frozen=True, eq=False)
class AcGan:
    """A model that classifies as ``classifier`` does, with a ``generator`` of noise ``[batch, latent]`` and a class."""

    classifier: Growing
    generator: Generator
    latent: int

    @property
    def kind(self) -> Kind:
        return self.generator.kind

    @cached_property
    def buffers(self) -> frozenset[str]:
        return self.classifier.buffers | {GENERATOR + name for name in self.generator.model.buffers}

    def init(self, seed: int) -> Tree:
        return self.begun(self.classifier.init(seed), seed)

    def begun(self, variables: Tree, seed: int) -> Tree:
        """The classifier's variables, with a new generator and a new source head."""
        seed = seeds.integer(seed, purpose="generator")
        width = variables[self.classifier.head.weight].shape[1]
        source = Linear(SOURCE, width, 1).init(torch.Generator().manual_seed(seed))
        generator = self.generator.model.init(seed)
        return {**variables, **source, **{GENERATOR + name: leaf for name, leaf in generator.items()}}

    def stripped(self, variables: Tree) -> Tree:
        return without_gan(variables)

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        outputs, buffers = self.classifier.apply(without_gan(variables), x, train)
        return outputs, {**buffers, **{name: variables[name] for name in self.buffers if name.startswith(GAN)}}

    def sources(self, variables: Tree, features: Tensor) -> Tensor:
        """The logits ``[batch]`` that a sample is real, from its features ``[batch, width]``."""
        return (features @ variables[f"{SOURCE}.weight"].t() + variables[f"{SOURCE}.bias"])[:, 0]

    def images(self, generator: Tree, z: Tensor, y: Tensor, train: bool) -> tuple[Tensor, Tree]:
        """Images of the classes ``y [batch]`` from noise ``z [batch, latent]``, and the generator's next buffers."""
        told = torch.arange(self.generator.noise - self.latent, device=y.device) == y[:, None]
        outputs, buffers = self.generator.model.apply(generator, torch.cat([z, told.to(z.dtype)], 1), train)
        return outputs.logits, buffers


class Adversarial(NamedTuple):
    """The carry of a step: all variables with the momentum of the discriminator's SGD, and the memory of Adam."""

    training: Training
    memory: Tree


@dataclass(frozen=True, eq=False, kw_only=True)
class AdversarialSGD(TaskSGD):
    """Local training of an AC-GAN, on a batch of real samples and a batch of made ones in each step.

    A step moves the discriminator by SGD and then the generator by Adam. Both minimise the cross-entropy of classes.
    The discriminator also learns to tell real samples from made ones, and the generator to mislead it. With ``replay``,
    half of the weight of the real samples goes to as many samples of ``shared["generator"]``, of classes that it has
    seen.
    """

    gan: AcGan
    generator_lr: float
    replay: bool
    takes_terms: ClassVar[bool] = False

    @property
    def kind(self) -> Kind:
        return self.gan.kind

    @property
    def passes(self) -> float:
        """How often an example is processed: real, made and replayed samples each once, and made ones once more."""
        return super().passes * (4.0 if self.replay else 3.0)

    @property
    def processed(self) -> float:
        return super().processed * (4.0 if self.replay else 3.0)

    @cached_property
    def generator_optimiser(self) -> Adam:
        """The optimiser of the generator."""
        # With a smaller epsilon, gradients that are nothing but rounding would make whole steps.
        return Adam(first_decay=0.5, epsilon=1e-5)

    def begin(self, shared: Forest, own: Tree, facts: Facts) -> Any:
        variables = shared["model"]
        judging, making = self._parts(variables)
        return Adversarial(Training(variables, self.optimiser.begin(judging)), self.generator_optimiser.begin(making))

    def step(self, carry: Any, batch: Batch, shared: Forest, own: Tree, facts: Facts, noise: Tree) -> tuple[Any, Tree]:
        variables = carry.training.variables
        classes = drawn_classes(variables[SEEN], noise[FAKE_CLASSES])
        data = self._data(batch, shared, noise)
        judging, making = self._parts(variables)
        made, _ = self.gan.images(generator_of(variables), noise[FAKE], classes, True)

        def judged(judging: Tree) -> tuple[Tensor, tuple[Tree, Tensor]]:
            return self._judgement({**variables, **judging}, data, made, classes, len(batch.y))

        slopes, (buffers, surprise) = torch.func.grad(judged, has_aux=True)(judging)
        judging, momentum = self.optimiser.step(judging, slopes, carry.training.momentum, facts.lr)
        judged_by = {**variables, **buffers, **judging}

        def fooled(making: Tree) -> tuple[Tensor, Tree]:
            images, changed = self.gan.images(generator_of({**variables, **making}), noise[FAKE], classes, True)
            outputs, _ = self.gan.classifier.apply(without_gan(judged_by), images, True)
            doubt = functional.softplus(-self.gan.sources(judged_by, outputs.features))
            return (doubt + row_cross_entropies(outputs.logits, classes)).mean(), changed

        slopes, changed = torch.func.grad(fooled, has_aux=True)(making)
        lr = facts.lr.new_full((), self.generator_lr)
        making, memory = self.generator_optimiser.step(making, slopes, carry.memory, lr)
        after = {**judged_by, **{GENERATOR + name: leaf for name, leaf in changed.items()}, **making}
        return Adversarial(Training(after, momentum), memory), {"loss": surprise}

    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        return super().finish(carry.training, shared, own, facts)

    def _parts(self, variables: Tree) -> tuple[Tree, Tree]:
        """The variables that the two optimisers train: those of the discriminator, and those of the generator."""
        trained = without(variables, self.model.buffers)
        judging = {name: leaf for name, leaf in trained.items() if not name.startswith(GENERATOR)}
        idle = {GENERATOR + name for name in self.gan.generator.idle}
        return judging, {name: leaf for name, leaf in trained.items() if name not in judging and name not in idle}

    def _data(self, batch: Batch, shared: Forest, noise: Tree) -> Batch:
        """The samples that count as real, with weights that add up to 1."""
        share = batch.weight / batch.weight.sum().clamp(min=1)
        if not self.replay:
            return batch._replace(weight=share)
        generator = shared["generator"]
        classes = drawn_classes(generator[SEEN], noise[OLD_CLASSES])
        x, _ = self.gan.images(generator_of(generator), noise[OLD], classes, False)
        half = torch.full_like(classes, 1, dtype=share.dtype) / (2 * len(classes))
        return Batch(torch.cat([batch.x, x]), torch.cat([batch.y, classes]), torch.cat([share / 2, half]))

    def _judgement(
        self, variables: Tree, data: Batch, made: Tensor, classes: Tensor, real: int
    ) -> tuple[Tensor, tuple[Tree, Tensor]]:
        """The discriminator's loss, its next buffers, and the cross-entropy of the first ``real`` rows of ``data``."""
        outputs, buffers = self.gan.classifier.apply(without_gan(variables), torch.cat([data.x, made]), True)
        sources, rows = self.gan.sources(variables, outputs.features), len(data.y)
        surprise = row_cross_entropies(outputs.logits, torch.cat([data.y, classes]))
        doubt = functional.softplus(torch.cat([-sources[:rows], sources[rows:]]))
        each = surprise + doubt
        value = (each[:rows] * data.weight).sum() + each[rows:].mean()
        own = data.weight[:real]
        known = (surprise[:real] * own).sum() / torch.where(own.sum() > 0, own.sum(), 1)
        return value, (buffers, known.detach())


def drawn_classes(seen: Tensor, noise: Tensor) -> Tensor:
    """Classes ``[batch]``, drawn evenly among those seen: the class with the largest of noise ``[batch, classes]``."""
    return torch.where(seen > 0, noise, -torch.inf).argmax(-1)


def row_cross_entropies(logits: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of each row in nats, ``[batch]``."""
    return -torch.where(true_class(logits, targets), logits.log_softmax(-1), 0).sum(-1)


def without_gan(variables: Tree) -> Tree:
    """The variables of the classifier alone."""
    return {name: leaf for name, leaf in variables.items() if not name.startswith(GAN)}


def generator_of(variables: Tree) -> Tree:
    """The generator's variables, under the names that the generator itself gives them."""
    return {name.removeprefix(GENERATOR): leaf for name, leaf in variables.items() if name.startswith(GENERATOR)}
