"""Tries the model alone on two samples: what it has to be and to give, and what an evaluation must leave as it is.

``trial.py`` goes on with the program of the first ask.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.built_again import Original
from fedemu.algorithms.data.extremes import extremes
from fedemu.algorithms.interface import Batch, Facts, Outputs, Tree
from fedemu.algorithms.models.around import ModelAround
from fedemu.algorithms.models.randomness.draws import KEY_SHAPE, Draws
from fedemu.algorithms.models.randomness.random_functions import Keyed
from fedemu.algorithms.models.torch_module import ModuleModel
from fedemu.algorithms.registry import find_criterion
from fedemu.algorithms.trees import map_leaves, views, without
from fedemu.coordinator.evaluation.evaluate import read
from fedemu.device.compute.executors.executor import is_machine_fault
from fedemu.device.compute.tapes.writing import nothing_written
from fedemu.ops.assembly.learning import model_seed
from fedemu.ops.assembly.parts import Parts
from fedemu.protocol.code.own_code import account
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.tensors import DTYPES


def evaluate(parts: Parts, samples: NDArray[np.int64]) -> None:
    """Apply the model to some training samples, and look at the shape and type of its logits."""
    corpus, model, name = parts.corpus, parts.model, parts.experiment.model.name
    if not (corpus.language or corpus.labelled):
        raise ConfigurationError(
            f"all labels of the data set {parts.experiment.data.dataset!r} are {corpus.class_names[0]!r}; "
            "there is nothing to learn from one class"
        )
    _require_variables(parts)
    for variable, leaf in parts.variables.items():
        if (kind := str(leaf.dtype).removeprefix("torch.")) not in DTYPES:
            raise ConfigurationError(
                f"model {name!r} has the variable {variable!r} of {kind}, which cannot travel to devices; "
                f"use one of {', '.join(DTYPES)}"
            )
    [(x, _)] = read(model, corpus, corpus.train, samples)
    try:
        with torch.inference_mode():
            outputs, _ = model.apply(parts.variables, x, False)
        logits: object = outputs.logits
    except Exception as error:
        refuse(f"model {name!r} can't be applied to a batch {list(x.shape)} of {_what(parts, x)}", error)
    each = [corpus.input_shape[-1], corpus.outputs] if corpus.language else [corpus.classes]
    wanted = [len(samples), *each]
    what = f"{corpus.outputs} tokens" if corpus.language else f"{corpus.classes} classes"
    if not isinstance(logits, Tensor):
        raise ConfigurationError(
            f"model {name!r} gives {type(logits).__name__} for logits; it must be a tensor {wanted}"
        )
    if list(logits.shape) != wanted:
        raise ConfigurationError(
            f"model {name!r} gives logits {list(logits.shape)} where the data have {what}; they must be {wanted}"
        )
    if not logits.is_floating_point():
        raise ConfigurationError(f"model {name!r} gives logits of {logits.dtype}; they must be floating-point numbers")
    _require_unchanged(parts, x)
    for split in (corpus.train, corpus.test):
        for x, _ in read(model, corpus, split, extremes(corpus, split)):
            try:
                with torch.inference_mode():
                    model.apply(parts.variables, x, False)
            except IndexError as error:
                refuse(
                    f"model {name!r} can't be applied to all samples, with values from {x.min()} to {x.max()}", error
                )


def _require_variables(parts: Parts) -> None:
    """Raise ConfigurationError unless a model of the user's own begins with the same tensors each time."""
    name, seed = parts.experiment.model.name, model_seed(parts.experiment)
    if ":" not in name:
        return
    first: object = parts.variables
    if not isinstance(first, Mapping) or not all(isinstance(leaf, Tensor) for leaf in first.values()):
        raise ConfigurationError(
            f"init of the model {name!r} returned no tensors by name; it must return all variables"
        )
    again = parts.model.init(seed)
    for variable, leaf in first.items():
        if variable not in again or not torch.equal(leaf.nan_to_num(), again[variable].nan_to_num()):
            raise ConfigurationError(
                f"model {name!r} begins with another {variable!r} each time; let init draw by a generator with its "
                "seed, as by torch.Generator().manual_seed(seed)"
            )


def require_gradient(parts: Parts, samples: NDArray[np.int64]) -> None:
    """Raise ConfigurationError if the logits of a model of the user's own depend on no variable that is trained."""
    corpus, model, name = parts.corpus, parts.model, parts.experiment.model.name
    if ":" not in name:
        return
    [(x, _)] = read(model, corpus, corpus.train, samples)
    try:
        trained = map_leaves(lambda leaf: leaf.clone().requires_grad_(), without(parts.variables, model.buffers))
        with torch.enable_grad():
            outputs, _ = model.apply({**parts.variables, **trained}, x, True)
    except Exception:  # the training step will tell it better
        return
    if not outputs.logits.requires_grad:
        raise ConfigurationError(
            f"model {name!r} gives logits that no variable has a gradient of, so training changes nothing; its forward "
            "must not detach them, and must not compute them under torch.no_grad or from .item() or .numpy()"
        )


def require_gradient_of_loss(parts: Parts, samples: NDArray[np.int64]) -> None:
    """Raise ConfigurationError if the logits have no gradient of a loss of the user's own."""
    corpus, name = parts.corpus, parts.experiment.algorithm.loss
    if ":" not in name:
        return
    [(x, y)] = read(parts.model, corpus, corpus.train, samples)
    try:
        one, labels = torch.ones((), dtype=torch.int64), torch.bincount(y, minlength=corpus.classes)
        facts = Facts(one * len(y), one, one * 0.1, one, one * 0, one > 0, labels, one * 0)
        with torch.no_grad():
            logits = parts.model.apply(views(parts.variables), x, False)[0].logits.detach()
        with torch.enable_grad():
            value = find_criterion(name, parts.model)(logits.requires_grad_(), Batch(x, y, torch.ones(len(y))), facts)
    except Exception:  # the training step will tell it better
        return
    if isinstance(value, Tensor) and not value.requires_grad:
        raise ConfigurationError(
            f"the loss {name!r} gives a value of which the logits have no gradient, so training changes nothing; it "
            "must not detach them, and must not be computed from .item(), .numpy() or .argmax()"
        )


def draws_outside(parts: Parts, samples: NDArray[np.int64]) -> bool:
    """Whether a model of the user's own draws by the generators of Python or numpy in training.

    Raises ConfigurationError if it keeps something from one batch to the next outside of buffers, or if training
    changes a buffer of a type that has no negative numbers.
    """
    corpus, model, name = parts.corpus, parts.model, parts.experiment.model.name
    if ":" not in name:
        return False
    [(x, _)] = read(model, corpus, corpus.train, samples)

    try:
        once, after = _applied(parts, x, train=True), states_of_generators()
        held = _held(parts, train=True)
        again = _applied(parts, x, train=True)
    except Exception:  # the training step will tell it better
        return False
    for buffer, leaf in once[1].items():
        if leaf.dtype == torch.uint8 and not torch.equal(leaf, parts.variables[buffer]):
            raise ConfigurationError(
                f"model {name!r} changes its buffer {buffer!r} in training, and uint8 has no negative numbers, which a "
                "change may be; make it int64"
            )
    _require_nothing_kept(parts, True, held, once[0], again[0])
    random.seed(0)
    np.random.seed(0)
    return after != states_of_generators()


def states_of_generators() -> tuple[object, str]:
    """The states of the generators of Python and numpy, which differ after a draw."""
    return random.getstate(), str(np.random.get_state())


def _applied(parts: Parts, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
    """What a model gives for a copy of a batch. All that it draws is the same each time.

    In training it gets copies of its variables, because it may write to them then, and else views.
    """
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    variables = map_leaves(torch.clone, parts.variables) if train else views(parts.variables)
    with torch.no_grad(), Keyed(Draws(torch.zeros(KEY_SHAPE, dtype=torch.int32))):
        return parts.model.apply(variables, x.clone(), train)


def _held(parts: Parts, train: bool) -> Original:
    """What a model of the user's own holds beside its variables. After its first batch this may be a cache, too."""
    return Original(_holder(parts, train), modules=True)


def _holder(parts: Parts, train: bool) -> object:
    """The module that is applied in this mode, or the model that is no module."""
    model: Any = parts.model.model if isinstance(parts.model, ModelAround) else parts.model
    return model.inner.module(train) if isinstance(model.inner, ModuleModel) else model.inner


def _require_nothing_kept(parts: Parts, train: bool, held: Original, once: Outputs, again: Outputs) -> None:
    """Raise ConfigurationError if two applications of a model to the same batch differ in logits or in what it holds.

    ``held`` is what it held between the two.
    """
    name = parts.experiment.model.name
    if not torch.equal(once.logits.nan_to_num(), again.logits.nan_to_num()):
        raise ConfigurationError(
            f"model {name!r} gives other logits when it is applied to the same batch again, because it keeps something "
            "from one batch to the next; keep it in a buffer (register_buffer), or draw by torch's functions"
        )
    if (changed := held.changed(_holder(parts, train))) is not None:
        raise ConfigurationError(
            f"model {name!r} keeps {changed!r} from one batch to the next outside of buffers, so devices would share "
            "it; keep it in a buffer (register_buffer), or leave it out"
        )


def _require_unchanged(parts: Parts, x: Tensor) -> None:
    """Raise ConfigurationError if a model of the user's own changes something by an evaluation that the next one sees.

    That is something that it keeps, or a variable, which is the one with which the run goes on.
    """
    name = parts.experiment.model.name
    if ":" not in name:
        return

    def written(variable: str) -> ConfigurationError:
        return ConfigurationError(
            f"model {name!r} writes to its variable {variable} in evaluation, and the run goes on with this variable; "
            "let it write only in training, or to a copy"
        )

    with nothing_written(((repr(variable), leaf) for variable, leaf in parts.variables.items()), written):
        once = _applied(parts, x, train=False)
    held = _held(parts, train=False)
    _require_nothing_kept(parts, False, held, once[0], _applied(parts, x, train=False)[0])


def refuse(said: str, error: Exception) -> NoReturn:
    """Raise ConfigurationError with the sentence ``said`` and the account of ``error``.

    An error that means a lack of memory is raised unchanged, because it is no fault of the experiment.
    """
    if is_machine_fault(error):
        raise error
    raise ConfigurationError(f"{said}: {account(error).removeprefix('device 0: ')}") from error


def _what(parts: Parts, x: Tensor) -> str:
    """What the samples are. Whole numbers that should be none of a vocabulary are a likely mistake."""
    if x.dtype != torch.int64 or parts.experiment.data.text.kind != "none":
        return "the data"
    return "whole numbers, which stand for tokens (give fractions if they are quantities, and uint8 if they are pixels)"
