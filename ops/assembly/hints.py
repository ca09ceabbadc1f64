"""Lines for people about what fits together, but is perhaps not meant so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from torch import nn

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import Model, PublicData, Revealing
from fedemu.algorithms.models.growing import Growing
from fedemu.algorithms.registry import CRITERIA, find
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.experiment import Data, Experiment
from fedemu.ops.experiment.mistakes import shown
from fedemu.protocol.wording import some_of

_MOST_NAMES: Final = 10


def warnings_of(parts: Parts) -> Iterator[str]:
    """Lines for people, each about one thing.

    They tell of images whose channels seem to come last, columns of a table without numbers, classes without a sample
    to train on, public data of none of the first classes, parameters of a loss, settings of a test split where the data
    have their own, no validation samples to evaluate on, and no models of devices to diagnose.
    """
    experiment, corpus = parts.experiment, parts.corpus
    yield from filter(
        None,
        (
            _channels_last(corpus.input_shape),
            _no_numbers(corpus.left_out),
            _untaught(corpus),
            untrained(parts.public, parts.model),
            _untrained_loss(experiment),
        ),
    )
    if corpus.own_test_split:
        yield from _unused(experiment.data)
    if experiment.evaluate.validation and not len(parts.partition.validation_indices):
        yield "warning: evaluate.validation has no effect, because no device holds samples back; raise data.validation"
    if experiment.diagnose.every and not any(isinstance(one, Revealing) for one in parts.algorithm.programs.values()):
        name = experiment.algorithm.name
        yield f"warning: diagnose.every has no effect, because no device sends a model with the method {name!r}"


def _channels_last(shape: Sequence[int]) -> str:
    """A line for people about samples that look like images whose channels come last. Empty if they do not."""
    if len(shape) != 3 or shape[2] not in (1, 3, 4) or min(shape[:2]) <= 4:
        return ""
    channels, height, width = shape
    return (
        f"warning: samples of shape {list(shape)} are images with {channels} channels of {height} × {width} pixels; if "
        "their channels come last, move them to the front, as by x.transpose(0, 3, 1, 2)"
    )


def _no_numbers(left_out: Sequence[str]) -> str:
    """A line for people about the columns of a table that are no part of a sample. Empty if there are none."""
    if not left_out:
        return ""
    return (
        f"warning: no part of a sample, because it holds no numbers: {_listed(left_out)}; make numbers of it, with "
        "a decimal point or by one-hot codes, if it should count"
    )


def _untaught(corpus: Corpus) -> str:
    """A line for people about classes without a sample to train on. Empty if there are none."""
    counts = np.bincount(corpus.train.y, minlength=corpus.classes)
    lacking = [name for name, count in zip(corpus.class_names, counts, strict=True) if not count]
    if not lacking:
        return ""
    return (
        f"warning: {len(lacking)} of {corpus.classes} classes have no sample to train on: {_listed(lacking)}; where y "
        "is an array of whole numbers, every number from 0 to the largest is a class"
    )


def _unused(data: Data) -> Iterator[str]:
    """Lines for people about the settings by which a test split would be set apart, unless they have their defaults."""
    for key in ("test_fraction", "test_by"):
        value = getattr(data, key)
        if value != Data.model_fields[key].default:
            why = f"{data.dataset!r} has a test split of its own"
            yield f"warning: data.{key} = {shown(value)} has no effect, because {why}"


def _listed(names: Sequence[str]) -> str:
    return some_of([*map(repr, names)], _MOST_NAMES)


def untrained(public: PublicData | None, model: Model) -> str:
    """A line for people if tasks begin before public samples of their classes can be trained on; empty if none does.

    Training on public data leaves out classes that have not come (``algorithms/training/server_training.py``). Without
    samples to train on there is none, and without samples for validation no trained model is found better.
    """
    if public is None or not isinstance(model, Growing):
        return ""
    parts = {
        "to train on": (public.train, "there is no training on public data"),
        "for validation": (public.validation, "training on public data finds no better model than it begins with"),
    }
    since = {use: int(model.since[part.y].min()) for use, (part, _) in parts.items()}
    use = max(since, key=since.__getitem__)
    if not since[use]:
        return ""
    part, effect = parts[use]
    return (
        f"warning: none of the {len(part)} public samples {use} is of a class that comes before period "
        f"{since[use] + 1}; until then {effect}; raise data.public.fraction"
    )


def _untrained_loss(experiment: Experiment) -> str:
    """A line for people about parameters of a loss of the user's own. Empty if there are none."""
    name = experiment.algorithm.loss
    loss: object = find("algorithm.loss", name, CRITERIA)
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    first = next((parameter for parameter, leaf in parameters if leaf.requires_grad), "")
    if not first:
        return ""
    return (
        f"warning: nobody trains {first!r} of the loss {name!r}: devices train the model alone; put it into the model, "
        "or give it requires_grad=False if it is to stay as it is"
    )
