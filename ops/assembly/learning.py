"""The model and the method of an experiment."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

from fedemu.algorithms.built_again import difference
from fedemu.algorithms.data.augment import augmentation
from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import LOGITS, Algorithm, Ask, Context, Model, Tree
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.low_precision import with_precision
from fedemu.algorithms.registry import (
    ALGORITHMS,
    BIDIRECTIONAL,
    CLASSIFIERS,
    MODELS,
    TERMS,
    build_algorithm,
    build_model,
    build_terms,
    find_criterion,
    require_options,
)
from fedemu.algorithms.replay.replay import with_replay
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.scripts import first_state, global_model, next_request
from fedemu.algorithms.terms.local_term import with_local_terms
from fedemu.algorithms.terms.remembering import with_terms
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.mixing import OwnModel
from fedemu.coordinator.record.outline import taken_apart
from fedemu.device.host.limits import only_free_memory
from fedemu.ops.assembly.stream import class_tasks
from fedemu.ops.experiment import Experiment
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError, lacks_memory


def open_algorithm(experiment: Experiment, corpus: Corpus, model: Model | None = None) -> tuple[Model, Algorithm[Any]]:
    """Build the model and the method of an experiment. They are the same in every process.

    With ``model`` the method is built for a model that was built before. Raises ConfigurationError if a name or an
    option is wrong, or if they do not fit the data.
    """
    if corpus.language and experiment.model.name in CLASSIFIERS:
        raise ConfigurationError(
            f"model {experiment.model.name!r} tells labels, but the data are texts whose tokens are predicted; "
            "choose model 'gru', 'tinybert' or 'tinybert_small'"
        )
    if corpus.tokens and not corpus.language and ":" not in experiment.model.name:
        raise ConfigurationError(
            f"model {experiment.model.name!r} can't read tokens, and the samples are whole numbers "
            f"{list(corpus.input_shape)}; name a model of your own, or give fractions if the numbers are quantities, "
            "and uint8 if they are pixels"
        )
    if experiment.data.text.kind == "next" and experiment.model.name in BIDIRECTIONAL:
        raise ConfigurationError(
            f"model {experiment.model.name!r} reads the tokens that data.text.kind = 'next' has it predict; "
            "choose model 'gru', or set data.text.kind = 'masked'"
        )
    if model is None:
        model = open_model(experiment, corpus)
    local, stream = experiment.local, experiment.stream
    masked = len(corpus.vocabulary) if experiment.data.text.kind == "masked" else 0
    ingredients = Ingredients(
        model=with_precision(model, local.precision),
        criterion=find_criterion(experiment.algorithm.loss, model),
        classes=corpus.classes,
        epochs=local.epochs,
        local_steps=local.steps,
        batch_size=min(local.batch_size, max(2, len(corpus.train.y))),  # batches are padded, so larger ones only cost
        lr=local.lr,
        momentum=local.momentum,
        weight_decay=local.weight_decay,
        lr_decay=local.lr_decay,
        augment=augmentation(local.augment, corpus.input_shape, corpus.mean, corpus.std, masked),
        devices=experiment.fleet.devices,
        public=experiment.data.public.fraction > 0,
        input_shape=corpus.input_shape,
        labelled=corpus.labelled,
        language=corpus.language,
        tokens=corpus.tokens,
        rounds_per_task=stream.rounds_each if local.lr_restart and stream.period_count > 1 else 0,
        kept=experiment.replay.kept,
        cumulative=stream.cumulative,
    )
    seed = seeds.integer(experiment.seed, purpose="method")
    terms = build_terms(experiment.algorithm.terms, ingredients, seed)
    ingredients = with_local_terms(ingredients, terms)
    name = experiment.algorithm.name
    built = build_algorithm(name, experiment.algorithm.options, ingredients, seed)
    algorithm = with_terms(built, terms, model, name)
    # Gradients that select samples are those of the exact model.
    exact = replace(ingredients, model=model)
    return model, _replaying(algorithm, experiment, exact) if experiment.replay.kept else algorithm


def open_model(experiment: Experiment, corpus: Corpus) -> Model:
    """Build the model of an experiment. Its classifier grows if the stream brings classes task by task.

    Raises ConfigurationError as ``open_algorithm`` does.
    """
    spec, seed = experiment.model, model_seed(experiment)
    model = build_model(spec.name, spec.options, corpus.input_shape, corpus.outputs, seed)
    if ":" in spec.name:
        model = OwnModel(model, corpus.input_shape, corpus.tokens)
    tasks = None if corpus.language else class_tasks(experiment, corpus.classes)
    if tasks is None:
        return model
    with _with_room_for_model(experiment):
        return growing(model, tasks, corpus.input_shape, corpus.tokens)


def require_fitting_options(experiment: Experiment) -> None:
    """Raise ConfigurationError if a built-in model, method or local term does not take the options that it is given.

    It needs no data, and builds nothing. What is somebody's own is left out.
    """
    model, algorithm = experiment.model, experiment.algorithm
    require_options("model", "model", model.name, MODELS, model.options, arguments=2)
    require_options("algorithm", "algorithm.options", algorithm.name, ALGORITHMS, algorithm.options)
    for name, options in algorithm.terms.items():
        require_options("algorithm.terms", f"algorithm.terms.{name}", name, TERMS, options)


def require_built_again(experiment: Experiment, corpus: Corpus, model: Model, algorithm: Algorithm[Any]) -> None:
    """Raise ConfigurationError if a method or a local term of the user's own is another one when it is built again."""
    settings = experiment.algorithm
    named = [("algorithm", settings.name), *(("the local term", term) for term in settings.terms)]
    own = [f"{what} {name!r}" for what, name in named if ":" in name]
    if not own:
        return
    try:
        _, again = open_algorithm(experiment, corpus, model)
    except Exception:  # each process of a run makes it once, and perhaps it cannot be made twice
        return
    if (part := difference(algorithm, again)) is not None:
        raise ConfigurationError(
            f"{' or '.join(own)} has another {part!r} each time that it is made, and each process makes it; give a "
            "generator of your own a fixed seed, or draw by torch, random or numpy.random, which follow from the "
            "experiment's seed"
        )


def _replaying(algorithm: Algorithm[Any], experiment: Experiment, ingredients: Ingredients) -> Algorithm[Any]:
    """Put replay around a method, so that devices keep samples for later periods."""
    replay = experiment.replay
    settings = ReplaySettings(
        strategy=replay.strategy,
        budget=replay.kept,
        capacity=replay.capacity,
        proportion=replay.proportion,
        restarts=replay.restarts,
        iterations=replay.iterations,
        targets=replay.targets,
        final=replay.final,
        objective=replay.objective,
        census=replay.census,
        memory=replay.memory_mib * 2**20,
        periods=experiment.stream.period_count,
        logits=LOGITS in ingredients.notes,
    )
    return with_replay(algorithm, settings, ingredients)


def initial_variables(experiment: Experiment, model: Model) -> Tree:
    """The global model before the first round. Raises ConfigurationError if this machine lacks the memory for it."""
    with _with_room_for_model(experiment):
        return model.init(model_seed(experiment))


def model_seed(experiment: Experiment) -> int:
    """The seed by which the first variables are drawn, and what is frozen in a module."""
    return seeds.integer(experiment.seed, purpose="model")


def _with_room_for_model(experiment: Experiment) -> AbstractContextManager[None]:
    """``within_memory`` for the model."""
    what = f"the model {experiment.model.name!r}"
    return within_memory(what, "make it smaller in [model]")


@contextmanager
def within_memory(what: str, remedy: str) -> Iterator[None]:
    """Turn a lack of memory into a ConfigurationError that says what does not fit."""
    try:
        with only_free_memory():
            yield
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        raise ConfigurationError(
            f"{what} does not fit into this machine's memory; {remedy}, or use a larger machine"
        ) from None


def first_ask(algorithm: Algorithm[Any], variables: Tree, context: Context) -> Ask | None:
    """The first ask of the first round. None if a round begins with a server job.

    ``context`` is the one before the first round. Raises ConfigurationError if a round is no script, or if the method
    tells no global model or another one, or has a state that a checkpoint cannot hold.
    """
    state = first_state(algorithm, variables, context)
    taken_apart(state, {})
    global_model(algorithm, state, variables)
    context = replace(context, round=1)
    script = algorithm.round(state, context)
    if not isinstance(script, Generator):
        raise ConfigurationError(
            "the algorithm's round is no generator; it must yield an Ask or a ServerJob, and return the next state"
        )
    try:
        request = next_request(script, None, context, 0)
    except StopIteration:
        return None
    finally:
        script.close()
    return request if isinstance(request, Ask) else None
