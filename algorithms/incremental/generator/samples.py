"""The samples that a trained generator makes, for rehearsal or for pictures, and a judgement of them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.incremental.generator.training import GeneratorTraining, classes_seen, intended_classes
from fedemu.algorithms.interface import Tree
from fedemu.algorithms.models.growing import SEEN, Growing
from fedemu.algorithms.models.image_generator import AT_ONCE, Generator


def synthetic(
    training: GeneratorTraining,
    generator: Tree,
    classifier: Growing,
    variables: Tree,
    samples: int,
    draws: np.random.Generator,
) -> Tree:
    """Synthetic samples ``x [samples · classes seen, ...]`` and their classes ``y``.

    If the noise tells the class, there are ``samples`` of each class. If it does not, ``y`` is what the classifier with
    these ``variables`` says.
    """
    seen = variables[SEEN] > 0
    count = samples * int(seen.sum())
    noise = draws.standard_normal((count, training.generator.noise), "float32")
    z = torch.from_numpy(noise)
    if z.shape[1] >= len(seen):  # noise that does not tell the class may have fewer values than there are classes
        z = even(z, seen, classifier)
    with torch.no_grad():
        x = _images(training.generator, generator, training.given(variables, z))
        if training.settings.targets == "noise":
            return {"x": x, "y": intended_classes(classifier, seen, z)}
        said = [classifier.apply(variables, some, False)[0].logits.argmax(-1) for some in torch.split(x, AT_ONCE)]
    return {"x": x, "y": torch.cat(said)}


def judgement(training: GeneratorTraining, generator: Tree, classifier: Tree, draws: np.random.Generator) -> Tree:
    """How good a generator is: measures of one batch of its images, by the ``classifier`` it was trained against.

    The measures are scalars: each of ``training.losses``, and ``recognised``, the share of the images that the
    classifier puts into the class that they are to show. If the noise does not tell the class, ``recognised`` is left
    out.
    """
    size = (training.settings.batch_size, training.generator.noise)
    z = torch.from_numpy(draws.standard_normal(size, "float32"))
    with torch.no_grad():
        x = _images(training.generator, generator, training.given(classifier, z))
        found = dict(training.losses(x, z, classifier, classes_seen(classifier)))
        if training.settings.targets == "noise":
            intended = intended_classes(training.classifier, classifier[SEEN] > 0, z)
            said = training.judged(x, classifier).logits.argmax(-1)
            found["recognised"] = (said == intended).float().mean()
    return found


def even(z: Tensor, seen: Tensor, classifier: Growing) -> Tensor:
    """Noise whose rows stand for the classes seen, in turn.

    If a row of ``z`` stands for another class, two of its values change places.
    """
    position = torch.from_numpy(classifier.tasks.position)
    rows = torch.arange(len(z))
    wanted = position[seen.nonzero()[:, 0]][rows % int(seen.sum())]
    found = position[intended_classes(classifier, seen, z)]
    after = z.clone()
    after[rows, wanted], after[rows, found] = z[rows, found], z[rows, wanted]
    return after


def _images(generator: Generator, variables: Tree, z: Tensor) -> Tensor:
    return torch.cat([generator.images(variables, some) for some in torch.split(z, AT_ONCE)])
