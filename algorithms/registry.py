"""Models, losses, local terms and methods by name: four tables, and the functions that build what an experiment names.

To add one to fedemu, write it in its room (``models/``, ``training/``, ``methods/`` or ``incremental/``), and give it a
line in its table here. A user's own code needs no line: an experiment names it as ``module:Name`` or ``file.py:Name``
(``docs/own_methods.md``).
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from fedemu.algorithms.analytic.afl import afl
from fedemu.algorithms.analytic.ncm import ncm
from fedemu.algorithms.incremental.data_free.lander import lander
from fedemu.algorithms.incremental.data_free.target import target
from fedemu.algorithms.incremental.fedcil import fedcil
from fedemu.algorithms.incremental.fedlwf_2t import fedlwf_2t
from fedemu.algorithms.incremental.fedprox_plus import fedprox_plus
from fedemu.algorithms.incremental.glfc import glfc
from fedemu.algorithms.incremental.icarl import icarl
from fedemu.algorithms.incremental.mfcl import fedavg_gen, mfcl
from fedemu.algorithms.incremental.task_by_task import NewClassCrossEntropy, TaskTemperature, with_tasks
from fedemu.algorithms.interface import Algorithm, Kind, Model
from fedemu.algorithms.methods.central import central
from fedemu.algorithms.methods.fedavg import fedavg, fedprox
from fedemu.algorithms.methods.fedcurv import fedcurv
from fedemu.algorithms.methods.feddf import feddf
from fedemu.algorithms.methods.fedkd import fedkd
from fedemu.algorithms.methods.fednova import fednova
from fedemu.algorithms.methods.fedntd import fedntd
from fedemu.algorithms.methods.fedreg import fedreg
from fedemu.algorithms.methods.finetuning import fedavg_finetuned
from fedemu.algorithms.methods.flashback import flashback
from fedemu.algorithms.methods.moon import moon
from fedemu.algorithms.methods.scaffold import scaffold
from fedemu.algorithms.models.bert import tinybert, tinybert_small
from fedemu.algorithms.models.feed_forward import cnn, lenet, mlp
from fedemu.algorithms.models.frozen import frozen_of
from fedemu.algorithms.models.growing import Growing
from fedemu.algorithms.models.gru import gru
from fedemu.algorithms.models.random_features import random_features
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module, under_seed, unrepeated
from fedemu.algorithms.terms.consolidation import ewc, mas
from fedemu.algorithms.terms.dark_experience import der
from fedemu.algorithms.terms.local_term import LocalTerm
from fedemu.algorithms.terms.lwf import lwf
from fedemu.algorithms.training.asymmetric import AsymmetricCrossEntropy
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import Criterion, cross_entropy, token_cross_entropy
from fedemu.algorithms.training.wsm import reweighted_softmax
from fedemu.protocol.code.named import load
from fedemu.protocol.code.own_code import account, own_frames
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import an_object, demand

ALGORITHMS: Mapping[str, Callable[..., Algorithm[Any]]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedntd": fedntd,
    "fedkd": fedkd,
    "moon": moon,
    "scaffold": scaffold,
    "fednova": fednova,
    "fedcurv": fedcurv,
    "fedreg": fedreg,
    "fedavg_finetuned": fedavg_finetuned,
    "central": central,
    "feddf": feddf,
    "flashback": flashback,
    "mfcl": mfcl,
    "fedavg_gen": fedavg_gen,
    "fedprox_plus": fedprox_plus,
    "fedlwf_2t": fedlwf_2t,
    "fedcil": fedcil,
    "ncm": ncm,
    "afl": afl,
    "icarl": icarl,
    "glfc": glfc,
    "target": target,
    "lander": lander,
}
"""Methods by ``algorithm.name``. A value is called with (ingredients, ``**algorithm.options``) and returns the method.

The names and types of its further arguments are the options that an experiment may set.
"""

CRITERIA: Mapping[str, Callable[..., Any]] = {
    "cross_entropy": cross_entropy,
    "wsm": reweighted_softmax,
    "new_classes": NewClassCrossEntropy,
    "task_temperature": TaskTemperature,
    "er_ace": AsymmetricCrossEntropy,
    "token_cross_entropy": token_cross_entropy,
}
"""Losses by ``algorithm.loss``. A value is a ``Criterion``, a class in ``OF_TASKS``, or ``AsymmetricCrossEntropy``."""
OF_TASKS = (NewClassCrossEntropy, TaskTemperature)
"""The losses that tell the classes of tasks apart. Called with a growing model, each makes a ``Criterion``."""

TERMS: Mapping[str, Callable[..., LocalTerm]] = {
    "ewc": ewc,
    "mas": mas,
    "lwf": lwf,
    "der": der,
}
"""Local terms by their key in ``algorithm.terms``. A value is called with (ingredients, the options of the term)."""

MODELS: Mapping[str, Callable[..., Any]] = {
    "mlp": mlp,
    "cnn": cnn,
    "lenet": lenet,
    "resnet18": resnet18,
    "random_features": random_features,
    "gru": gru,
    "tinybert": tinybert,
    "tinybert_small": tinybert_small,
}
"""Models by ``model.name``. A value is called with (shape of a sample, number of outputs, other keys of ``[model]``).

It returns a ``Model`` or a ``torch.nn.Module``.
"""

CLASSIFIERS = ("mlp", "cnn", "lenet", "resnet18", "random_features")
"""The models that predict labels. They cannot read tokens."""
BIDIRECTIONAL = ("tinybert", "tinybert_small")
"""The models of texts that see the tokens on both sides of a token. They cannot predict the next one."""


def build_model(
    name: str, options: Mapping[str, Any], input_shape: tuple[int, ...], outputs: int, seed: int = 0
) -> Model:
    """The model ``name`` for samples of this shape; ``options`` are the further arguments of its builder.

    ``outputs`` is the number of classes, or of the vocabulary's tokens (``Corpus.outputs``). What is frozen in a module
    is built under ``seed``. Raises ConfigurationError if there is no such model, if the options do not fit it, if
    nothing in a module is trained, or if a module is another one each time it is built.
    """
    builder = find("model", name, MODELS)

    arguments = (input_shape, outputs) if _takes_arguments(builder) else ()

    def build() -> Any:
        return _call("model", name, builder, arguments, options)

    model = under_seed(build, seed)
    if isinstance(model, nn.Module):
        made = from_module(build, seed=seed)
        if differing := unrepeated(model, {**made.init(seed), **made.frozen}):
            raise ConfigurationError(
                f"model {name!r} begins with another {differing!r} each time it is built; let its constructor draw by "
                "torch, random or numpy.random, or by a generator with a fixed seed"
            )
        return made
    built: Model = _with_members(model, "model", name, ("kind", "buffers", "init", "apply"))
    if built.kind not in get_args(Kind):
        raise ConfigurationError(
            f"model {name!r} is of the kind {built.kind!r}; it must be {' or '.join(get_args(Kind))}"
        )
    frozen: object = frozen_of(built)
    if not isinstance(frozen, Mapping) or not all(isinstance(leaf, Tensor) for leaf in frozen.values()):
        raise ConfigurationError(f"frozen of the model {name!r} is {an_object(frozen)}; it must have tensors by name")
    return built


def model_defaults(name: str) -> dict[str, Any]:
    """The options of the built-in model ``name`` with their defaults. Empty for any other model."""
    parameters = inspect.signature(MODELS[name]).parameters.values() if name in MODELS else ()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def build_algorithm(name: str, options: Mapping[str, Any], ingredients: Ingredients, seed: int = 0) -> Algorithm[Any]:
    """The method ``name``. If the model grows task by task, the method is prepared for tasks.

    What its builder draws by torch, numpy or Python follows from ``seed``. Raises ConfigurationError if there is no
    such method, or if it does not fit its options or the ingredients.
    """
    ingredients.require_fitting_criterion()
    builder = find("algorithm", name, ALGORITHMS)
    algorithm = under_seed(lambda: _call("algorithm.options", name, builder, (ingredients,), options), seed)
    members = ("programs", "init", "round", "variables")
    built: Algorithm[Any] = _with_members(algorithm, "algorithm", name, members)
    if not isinstance(built.programs, Mapping):
        raise ConfigurationError(
            f"algorithm {name!r} has its programs in {an_object(built.programs)}; "
            'they must have names, as in {"train": ingredients.local_sgd()}'
        )
    return with_tasks(built, ingredients.model)


def build_terms(
    terms: Mapping[str, Mapping[str, Any]], ingredients: Ingredients, seed: int = 0
) -> dict[str, LocalTerm]:
    """The local terms of ``algorithm.terms``, which names each with its options.

    What their builders draw by torch, numpy or Python follows from ``seed``. Raises ConfigurationError if there is no
    such term, if it does not fit its options or the ingredients, or if two terms would keep what they remember under
    one name.
    """
    built: dict[str, LocalTerm] = {}
    for name, options in terms.items():
        builder = find("algorithm.terms", name, TERMS)
        found = under_seed(partial(_call, f"algorithm.terms.{name}", name, builder, (ingredients,), options), seed)
        if not isinstance(found, LocalTerm):
            raise ConfigurationError(f"algorithm.terms {name!r} made {an_object(found)}; it must be a LocalTerm")
        if other := next((other for other, term in built.items() if term.name == found.name), ""):
            raise ConfigurationError(
                f"algorithm.terms {other!r} and {name!r} both make a LocalTerm {found.name!r}, and what is remembered "
                "for a term is kept under this name; give your own another name"
            )
        _require_takes(("the model", "the pass"), found.term, f"the function of algorithm.terms {name!r}")
        built[name] = found
    return built


def find_criterion(name: str, model: Model | None = None) -> Criterion:
    """The loss ``name``.

    Raises ConfigurationError if there is no such loss, or if it needs new classes but ``model`` does not grow.
    """
    found: Any = find("algorithm.loss", name, CRITERIA)
    if found is AsymmetricCrossEntropy:
        return AsymmetricCrossEntropy(model if isinstance(model, Growing) else None)
    if found not in OF_TASKS:
        if not inspect.isclass(found):
            _require_takes(("logits", "batch", "facts"), found, f"algorithm.loss {name!r}")
        criterion: Criterion = found
        return criterion
    if not isinstance(model, Growing):
        raise ConfigurationError(
            f"algorithm.loss = {name!r} is about the classes of the current task, but the stream brings none; "
            "set stream.kind = 'classes', or algorithm.loss = 'cross_entropy'"
        )
    of_tasks: Criterion = found(model)
    return of_tasks


def require_options(
    what: str, table: str, name: str, known: Mapping[str, Any], options: Mapping[str, Any], arguments: int = 1
) -> None:
    """Raise ConfigurationError if ``known`` has no ``name``, or if the options in ``table`` do not fit it.

    Nothing is built. Its builder is called with so many ``arguments`` before the options. What ``module:Name`` names is
    left out, because its module would have to be run.
    """
    if ":" not in name:
        builder = find(what, name, known)
        _require_known(table, name, builder, arguments, options)
        _checked(table, name, builder, options)


def find(what: str, name: str, known: Mapping[str, Any]) -> Any:
    """The entry ``name`` of a table, or the function or class that ``module:Name`` names.

    Raises ConfigurationError, which speaks of ``what``, if it is neither.
    """
    if name in known:
        return known[name]
    if ":" not in name:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "your own are named module:Name"
        raise ConfigurationError(f"{what} {name!r} is none of {', '.join(known)}; {hint}")
    try:
        # Whatever a module draws when it is imported is the same in every process.
        found = under_seed(lambda: load(name), 0)
    except ConfigurationError as error:
        raise ConfigurationError(f"{what} {name!r}: {error}") from error
    if not callable(found):
        raise ConfigurationError(f"{what} {name!r} is {type(found).__name__}; it must be a function or a class")
    return found


def _require_takes(arguments: tuple[str, ...], function: Callable[..., Any], what: str) -> None:
    """Raise ConfigurationError, which speaks of ``what``, if a function can't be called with so many arguments."""
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # some functions of C tell none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigurationError(f"{what} is called with ({', '.join(arguments)}), and can't be: {error}") from None


def _takes_arguments(builder: Callable[..., Any]) -> bool:
    """Whether a builder of a model is called with the shape of a sample and the number of classes.

    It is if it needs arguments by position, or if its first two are called so. An ordinary module with sizes of its own
    is built without any, and options are keywords.
    """
    try:
        parameters = inspect.signature(builder).parameters.values()
    except ValueError:
        return True
    by_position = [one for one in parameters if one.kind not in (one.KEYWORD_ONLY, one.VAR_KEYWORD)]
    needed = any(one.kind is one.VAR_POSITIONAL or one.default is one.empty for one in by_position)
    return needed or [one.name for one in by_position[:2]] == ["input_shape", "classes"]


def _call(
    table: str, name: str, builder: Callable[..., Any], arguments: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """Call a builder with the options of an experiment file. Raises ConfigurationError if they do not fit it."""
    _require_known(table, name, builder, len(arguments), options)
    try:
        return builder(*arguments, **_checked(table, name, builder, options))
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, TypeError) and not own_frames(error):
            raise ConfigurationError(
                f"{name!r} can't be built: {error}; it is called with {_words_of(table)}"
            ) from error
        raise ConfigurationError(f"{name!r} can't be built: {account(error)}") from error


def _require_known(
    table: str, name: str, builder: Callable[..., Any], arguments: int, options: Mapping[str, Any]
) -> None:
    """Raise ConfigurationError for an option that a builder does not take after its first ``arguments``."""
    try:
        parameters = list(inspect.signature(builder).parameters.values())
    except ValueError:
        parameters = []
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    known = [parameter.name for parameter in parameters[arguments:]]
    for option in options:
        if option not in known and not takes_any:
            near = difflib.get_close_matches(option, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known) or 'no options'}"
            raise ConfigurationError(f"{name!r} has no option {table}.{option}; {hint}")


def _words_of(table: str) -> str:
    """The arguments with which a builder is called, in words."""
    if table == "model":
        return "(input_shape, classes) and the options of [model], or without the two if it takes no such arguments"
    return f"(ingredients) and the options of [{table}]"


def _checked(table: str, name: str, builder: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, converted to the types of the builder's annotations. A boolean never counts as a number."""
    try:
        types = get_type_hints(builder.__init__ if inspect.isclass(builder) else builder, include_extras=True)
    except Exception:  # an annotation may be any text, and may name what only a type checker imports
        types = {}
    checked = {}
    for option, value in options.items():
        try:
            strict = isinstance(value, bool)
            checked[option] = TypeAdapter(types.get(option, Any)).validate_python(value, strict=strict)
        except ValidationError as error:
            first = error.errors()[0]
            inside = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
            place = f"{table}.{option}{inside}"
            raise ConfigurationError(
                f"{place} = {first['input']!r} does not fit {name!r}: it must be {demand(first)}"
            ) from None
        if (turned := _turned(value, checked[option], f"{table}.{option}")) is not None:
            raise ConfigurationError(f"{turned[0]} does not fit {name!r}: it must be {turned[1]}")
        if ":" not in name and (required := _unfit_float(checked[option])):
            raise ConfigurationError(f"{table}.{option} = {value!r} does not fit {name!r}: {required}")
        if ":" not in name and _largest(checked[option]) > _MOST:
            raise ConfigurationError(
                f"{table}.{option} = {value!r} does not fit {name!r}: whole numbers must be at most {_MOST}"
            )
    return checked


def _turned(value: object, checked: object, place: str) -> tuple[str, str] | None:
    """The first part of a value that became a number or a boolean and was none, with its place, and what it must be.

    A text such as "64" is one, so that an experiment has one digest however it is written.
    """
    if isinstance(value, list | tuple) and isinstance(checked, list | tuple):
        pairs = enumerate(zip(value, checked, strict=True))
        found = (_turned(*pair, f"{place}[{number}]") for number, pair in pairs)
        return next((turned for turned in found if turned is not None), None)
    if isinstance(checked, bool):
        return None if isinstance(value, bool) else (f"{place} = {value!r}", "true or false")
    if isinstance(checked, int | float) and isinstance(value, bool | str):
        return f"{place} = {value!r}", "a number"
    return None


_MOST = 2**32 - 1
"""The largest whole number in an option of fedemu's own builders: the largest seed, and more than any size."""


_FLOAT32: Final = (2.0**-126, (2.0 - 2.0**-23) * 2.0**127)
"""The smallest number above 0 and the largest one that float32 holds with all its digits."""


def _unfit_float(value: object) -> str:
    """What a number in a value must be that tensors of float32 cannot be multiplied by. Empty if there is none."""
    if isinstance(value, list | tuple):
        return next((required for each in value if (required := _unfit_float(each))), "")
    if not isinstance(value, float) or value == 0.0:
        return ""
    if not math.isfinite(value):
        return "it must be finite"
    smallest, largest = _FLOAT32
    return "" if smallest <= abs(value) <= largest else "it must be 0, or from 1.2e-38 to 3.4e38, to be a float32"


def _largest(value: object) -> int:
    """The largest whole number in a value, at least 0."""
    if isinstance(value, int):
        return value
    return max(map(_largest, value), default=0) if isinstance(value, list | tuple) else 0


def _with_members(built: Any, what: str, name: str, members: tuple[str, ...]) -> Any:
    """``built``, if it is an object with all of these members; raises ConfigurationError otherwise."""
    if inspect.isclass(built):
        raise ConfigurationError(
            f"{what} {name!r} made the class {built.__name__}; it must make an object of the class"
        )
    lacking = [member for member in members if not hasattr(built, member)]
    if lacking:
        raise ConfigurationError(
            f"{what} {name!r} made {an_object(built)}, which lacks {', '.join(lacking)}; "
            f"see {'Model' if what == 'model' else 'Algorithm'} in fedemu.algorithms"
        )
    return built
