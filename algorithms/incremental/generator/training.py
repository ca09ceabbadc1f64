"""The training of a generator without data, at the coordinator: a frozen classifier judges its images.

The generator minimises equation 5 of MFCL (Babakniya et al., 2023, section 3.1),

    CE + diversity · L_div + batch_statistics · L_BN + image_prior · L_pr,

by Adam, against the global model in evaluation mode. Weights, noise and iterations are those of table 8.

The authors' code differs from the text in three points. Both ways are offered:

- ``targets``: the class that an image is to show is the largest of the noise's first q values (``noise``, equation 1),
  or what the classifier says (``model``, the code). With ``model`` the noise does not tell the class.
- ``temperature`` divides the logits of the classes seen in cross-entropy. It is 1 in the text and 1000 in the code.
- ``entropy``: L_div is divided by the number of classes q (``classes``, equation 2) or by its logarithm
  (``logarithm``, the code, which also adds 1 to it).

The defaults are the text's. With them MFCL did better on the digits in five tasks: the average incremental accuracy
over two seeds is 0.88. With targets by the model it is 0.70, and with temperature 1000 it is 0.77; ``entropy`` made no
difference (``docs/results/classes.md``).

The code takes 100 iterations, noise of 1000 values and ``batch_statistics`` 50 by default. The paper does not give the
size of a batch, the learning rate and Adam's decays: 128, 0.001 and the usual decays are the code's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.graphs.repeated import Repeated, uploaded
from fedemu.algorithms.incremental.generator.losses import (
    batch_statistics_loss,
    image_prior_loss,
    information_entropy_loss,
)
from fedemu.algorithms.interface import Context, Outputs, Script, ServerJob, Tree
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.models.image_generator import Generator
from fedemu.algorithms.models.layer_statistics import running_statistics, unwatched
from fedemu.algorithms.training.adam import Adam
from fedemu.algorithms.training.job_device import job_device, moved, same_every_time
from fedemu.algorithms.trees import flatten, gradients_of, map_leaves, unflatten, variables_of, without
from fedemu.protocol import seeds

STRIDE: Final = 20
"""The number of iterations in one step of the job. They take far longer than passing the weights to the next step."""
CHECKPOINT_EVERY: Final = 10
"""The number of steps between two checkpoints of the job."""

_OPTIMISER: Final = Adam()

Targets = Literal["noise", "model"]
Entropy = Literal["classes", "logarithm"]


@dataclass(frozen=True)
class GeneratorSettings:
    """How a generator is trained.

    The first three fields are the weights of its losses; a weight of 0 leaves a loss out.
    """

    diversity: float = 1.0
    batch_statistics: float = 75.0
    image_prior: float = 0.001
    iterations: int = 5000
    batch_size: int = 128
    lr: float = 0.001
    targets: Targets = "noise"
    class_signal: float = 0.0
    temperature: float = 1.0
    entropy: Entropy = "classes"

    @property
    def signal(self) -> float:
        """How clearly the noise tells the class: ``class_signal``, or 0 if the model says the class."""
        return self.class_signal if self.targets == "noise" else 0.0


@dataclass(frozen=True, eq=False)
class GeneratorTraining:
    """Trains a generator against a classifier.

    If ``settings.batch_statistics`` is not 0, ``classifier`` must be one that reports statistics of its layers.
    """

    generator: Generator
    classifier: Growing
    settings: GeneratorSettings

    def train(self, classifier: Tree, start: Tree, context: Context) -> Script[Tree]:
        """A part of the round: the generator's variables after training against the variables ``classifier``.

        The training begins with the variables ``start``, or with new ones if ``start`` is empty.
        """
        carry: Tree = yield self.job(classifier, start, context)
        return unflatten(carry)["generator"]

    def job(self, classifier: Tree, start: Tree, context: Context) -> ServerJob:
        """The training as a server job, with ``STRIDE`` iterations a step.

        The noise is a function of (seed, round, iteration).
        """
        iterations = Repeated(self._iteration)

        def init() -> Tree:
            variables = start or self.generator.model.init(seeds.integer(context.seed, purpose="generator"))
            memory = _OPTIMISER.begin(without(variables, self.generator.model.buffers))
            return flatten({"generator": variables, "memory": memory})

        @cache
        def here(device: torch.device) -> Tree:
            seen = {"classes": classes_seen(classifier), "lr": torch.tensor(self.settings.lr)}
            return moved(flatten({"classifier": classifier, "seen": seen}), device)

        def step(carry: Tree, index: int) -> tuple[Tree, bool]:
            device = job_device()
            first = index * STRIDE
            numbers = range(first, min(first + STRIDE, self.settings.iterations))
            noise = uploaded([self._noise(number, context) for number in numbers], device)
            with same_every_time(device):
                inputs = [{"z": z} for z in noise]
                return iterations.over(moved(carry, device), here(device), inputs, device), False

        steps = math.ceil(self.settings.iterations / STRIDE)
        return ServerJob("generator", init, step, steps, CHECKPOINT_EVERY)

    def losses(self, images: Tensor, z: Tensor, classifier: Tree, classes: Tensor) -> Mapping[str, Tensor]:
        """The weighted losses by name: ``cross_entropy``, and each loss whose weight in ``settings`` is not 0.

        ``classes`` int64 are those that the classifier has seen.
        """
        settings = self.settings
        outputs = self.judged(images, classifier)
        seen = classifier[SEEN] > 0
        values = {"cross_entropy": self._cross_entropy(outputs, z, seen)}
        if settings.diversity:
            known = len(classes)
            scale = known / math.log(max(known, 2)) if settings.entropy == "logarithm" else 1.0
            entropy = information_entropy_loss(outputs.logits.index_select(1, classes))
            values["diversity"] = settings.diversity * scale * entropy
        if settings.batch_statistics:
            distance = batch_statistics_loss(running_statistics(classifier), outputs.statistics)
            values["batch_statistics"] = settings.batch_statistics * distance
        if settings.image_prior:
            values["image_prior"] = settings.image_prior * image_prior_loss(images)
        return values

    def given(self, classifier: Tree, z: Tensor) -> Tensor:
        """What the generator gets of the noise ``z [batch, noise]``: see ``told``."""
        return told(self.classifier, classifier[SEEN] > 0, z, self.settings.signal)

    def judged(self, images: Tensor, classifier: Tree) -> Outputs:
        """The outputs of the classifier for images, in evaluation mode.

        Running statistics of layers among the variables ``classifier`` are left out.
        """
        outputs, _ = self.classifier.apply(unwatched(classifier), images, False)
        return outputs

    def _cross_entropy(self, outputs: Outputs, z: Tensor, seen: Tensor) -> Tensor:
        if self.settings.targets == "model":
            targets = outputs.logits.argmax(-1)
        else:
            targets = intended_classes(self.classifier, seen, z)
        # Unseen logits are only ``growing.APART`` below the highest. Division by a temperature would bring them back.
        logits = torch.where(seen, outputs.logits, -torch.inf)
        return functional.cross_entropy(logits / self.settings.temperature, targets)

    def _iteration(self, carry: Tree, fixed: Tree, given: Tree) -> Tree:
        """The ``generator`` and the ``memory`` of its optimiser after an iteration with the noise ``z``."""
        forest, known = unflatten(carry), unflatten(fixed)
        variables, seen = forest["generator"], known["seen"]
        gradients, changed = self._gradients(variables, known["classifier"], seen["classes"], given["z"])
        before = without(variables, self.generator.model.buffers)
        trained, memory = _OPTIMISER.step(before, gradients, forest["memory"], seen["lr"])
        return flatten({"generator": {**variables, **changed, **trained}, "memory": memory})

    def _gradients(self, variables: Tree, classifier: Tree, classes: Tensor, z: Tensor) -> tuple[Tree, Tree]:
        """The gradients by the generator's trained variables, and its buffers after the forward pass."""
        model = self.generator.model
        trained = variables_of(without(variables, model.buffers))
        made, buffers = model.apply({**variables, **trained}, self.given(classifier, z), True)
        loss = torch.stack(list(self.losses(made.logits, z, classifier, classes).values())).sum()
        return gradients_of(loss, trained), map_leaves(Tensor.detach, buffers)

    def _noise(self, iteration: int, context: Context) -> Tensor:
        draws = seeds.generator(context.seed, round=context.round, purpose=f"generator/{iteration}")
        return torch.from_numpy(draws.standard_normal((self.settings.batch_size, self.generator.noise), "float32"))


def classes_seen(classifier: Tree) -> Tensor:
    """The classes that tasks have brought so far, int64. It waits for a GPU."""
    return (classifier[SEEN] > 0).nonzero()[:, 0]


def intended_classes(classifier: Growing, seen: Tensor, z: Tensor) -> Tensor:
    """The classes ``[batch]`` that noise ``z [batch, noise]`` stands for (MFCL, equation 1).

    It is the class with the largest value among the classes ``seen [classes]`` (bool). The value of a class is at its
    position in the order in which classes come.
    """
    position = classifier.position.on(z.device)
    return torch.where(seen, z.index_select(1, position), -torch.inf).argmax(-1)


def told(classifier: Growing, seen: Tensor, z: Tensor, signal: float) -> Tensor:
    """The noise ``z [batch, noise]`` with its class told by a single value, as the generator gets it.

    The first values, one for each class of the data, become 0, and that of the intended class becomes ``signal``. The
    others stay. With ``signal`` 0 all values stay as they are, and the class is the largest of many (MFCL, equation 1).
    """
    if not signal:
        return z
    position = classifier.position.on(z.device)
    chosen = position.index_select(0, intended_classes(classifier, seen, z))
    marked = torch.arange(len(position), device=z.device) == chosen[:, None]
    return torch.cat([signal * marked.to(z.dtype), z[:, len(position) :]], 1)
