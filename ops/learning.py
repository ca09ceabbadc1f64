"""An experiment's model and method, put together from its configuration, and the trainer of its programs."""

from __future__ import annotations

from typing import Any

from fedemu.algorithms.augment import augmentation
from fedemu.algorithms.corpus import Corpus
from fedemu.algorithms.ingredients import Ingredients
from fedemu.algorithms.interface import Algorithm, Ask, Context, Forest, Model, Tree
from fedemu.algorithms.registry import build_algorithm, build_model, find_criterion
from fedemu.device.training import Trainer
from fedemu.ops.config import Experiment
from fedemu.ops.datasets import open_corpus
from fedemu.ops.public_data import open_public
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError


def open_algorithm(experiment: Experiment, corpus: Corpus) -> tuple[Model, Algorithm[Any]]:
    """The same in every process; raises ConfigurationError where a name or an option is wrong, or data don't fit."""
    model = build_model(experiment.model.name, experiment.model.options, corpus.input_shape, corpus.classes)
    local = experiment.local
    ingredients = Ingredients(
        model=model,
        criterion=find_criterion(experiment.algorithm.loss),
        classes=corpus.classes,
        epochs=local.epochs,
        batch_size=local.batch_size,
        lr=local.lr,
        momentum=local.momentum,
        weight_decay=local.weight_decay,
        lr_decay=local.lr_decay,
        augment=augmentation(local.augment, corpus.input_shape, corpus.mean, corpus.std),
        devices=experiment.fleet.devices,
        public=experiment.data.public.fraction > 0,
        input_shape=corpus.input_shape,
    )
    return model, build_algorithm(experiment.algorithm.name, experiment.algorithm.options, ingredients)


def initial_variables(experiment: Experiment, model: Model) -> Tree:
    """The global model before the first round; raises ConfigurationError where this machine can't hold it."""
    try:
        return model.init(seeds.integer(experiment.seed, purpose="model"))
    except (RuntimeError, MemoryError) as error:
        # torch has no type of its own for a failed allocation in host memory.
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise ConfigurationError(
                f"the model {experiment.model.name!r} does not fit into this machine's memory; "
                "make it smaller in [model], or use a larger machine"
            ) from None
        raise


def open_trainer(experiment: bytes, device_type: str) -> Trainer:
    """A trainer of the experiment's programs; ``warm_up`` gets it ready for the first round's first ask."""
    settings = Experiment.from_bytes(experiment)
    corpus = open_corpus(settings.data)
    model, algorithm = open_algorithm(settings, corpus)
    return Trainer(
        algorithm.programs,
        corpus,
        settings.seed,
        device_type=device_type,
        executor=settings.local.executor,
        kind=model.kind,
        examples=_first_asks(model, algorithm, settings, corpus),
    )


def _first_asks(model: Model, algorithm: Algorithm[Any], settings: Experiment, corpus: Corpus) -> dict[str, Forest]:
    """What the first request of the first round shares, by program; nothing where a round begins at the coordinator."""
    public = open_public(corpus, settings.data, settings.seed)
    context = Context(round=1, task=0, seed=settings.seed, classes=corpus.classes, public=public)
    script = algorithm.round(algorithm.init(model.init(0), context), context)
    try:
        request = next(script)
    except StopIteration:
        return {}
    finally:
        script.close()
    return {request.program: request.shared} if isinstance(request, Ask) else {}
