"""What a trained generator makes: samples of the classes seen, for rehearsal or to look at, and how good they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedemu.algorithms.incremental.generator.training import GeneratorTraining, intended_classes
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
    at_once: int = 0,
) -> Tree:
    """``x [samples · classes seen, ...]`` and ``y``, as many of each class where noise tells the class.

    Where it does not, ``y`` is what the classifier with these ``variables`` says. They are made ``at_once``, 0 being
    all.
    """
    seen = variables[SEEN] > 0
    count = samples * int(seen.sum())
    noise = draws.standard_normal((count, training.generator.noise), "float32")
    z = even(torch.from_numpy(noise), seen, classifier)
    with torch.no_grad():
        x = _images(training.generator, generator, z, at_once or count)
        if training.settings.targets == "noise":
            return {"x": x, "y": intended_classes(classifier, seen, z)}
        parts = torch.split(x, at_once or count)
        said = [classifier.apply(variables, some, False)[0].logits.argmax(-1) for some in parts]
    return {"x": x, "y": torch.cat(said)}


def judgement(training: GeneratorTraining, generator: Tree, classifier: Tree, draws: np.random.Generator) -> Tree:
    """One batch of the generator, as devices get it, before the ``classifier`` that it was trained against.

    Scalars: each of ``training.losses``, and ``recognised``, the share of the images that the classifier puts into the
    class that they are to show; that is left out where noise tells no class.
    """
    size = (training.settings.batch_size, training.generator.noise)
    z = torch.from_numpy(draws.standard_normal(size, "float32"))
    with torch.no_grad():
        x = _images(training.generator, generator, z, AT_ONCE)
        found = dict(training.losses(x, z, classifier))
        if training.settings.targets == "noise":
            intended = intended_classes(training.classifier, classifier[SEEN] > 0, z)
            said = training.judged(x, classifier).logits.argmax(-1)
            found["recognised"] = (said == intended).float().mean()
    return found


def even(z: Tensor, seen: Tensor, classifier: Growing) -> Tensor:
    """Noise whose rows stand for the classes seen, in turn: two values of a row change places where need be."""
    position = torch.from_numpy(classifier.tasks.position)
    rows = torch.arange(len(z))
    wanted = position[seen.nonzero()[:, 0]][rows % int(seen.sum())]
    found = position[intended_classes(classifier, seen, z)]
    after = z.clone()
    after[rows, wanted], after[rows, found] = z[rows, found], z[rows, wanted]
    return after


def _images(generator: Generator, variables: Tree, z: Tensor, at_once: int) -> Tensor:
    return torch.cat([generator.images(variables, some) for some in torch.split(z, at_once)])
