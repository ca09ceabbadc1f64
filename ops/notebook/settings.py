"""The experiment that a call of ``fedemu.run`` means, from what a program passes."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedemu.ops.data.own.given import store
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import CONFIG_FILE, NOT_SETTINGS, PREFIX, load_experiment, write_frozen
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.ops.experiment.without_effect import WithoutEffect
from fedemu.ops.homes import cache_folder
from fedemu.ops.notebook.cells import name_of, short
from fedemu.protocol.code.own_code import Elsewhere, cause_of, own_frames
from fedemu.protocol.errors import ConfigurationError, FedemuError

Source = Experiment | Mapping[str, Any] | str | Path | None
"""An experiment as a program has it: an object, a table, the name of a preset, a file, or None for ``digits``."""

NAMED = frozenset({"model", "algorithm"})
"""The tables that are chosen by their name."""
_RUNTIME = ("bind", "metrics-port", "nodes", "on")
"""Options of ``fedemu run`` that are settings of the runtime. The others are arguments of their own."""
_OPTION = re.compile(
    rf"(?<![\w-])--(out|resume|seeds|transport|{'|'.join(_RUNTIME)})(?![\w-])(?: (?:'([^']+)'|([^\s,;)]+)))?"
)
"""An option of ``fedemu run`` in a sentence, and the value that follows it, if there is one."""


def load(
    source: Source, settings: list[str], without_effect: WithoutEffect | None = None
) -> tuple[Experiment, Runtime]:
    """Check an experiment with the overrides ``settings``. Raises ConfigurationError if something is wrong.

    ``without_effect`` gathers what the program has set.
    """
    with named(source) as (name, environment):
        return load_experiment(name, settings, environment, without_effect)


@contextmanager
def named(source: Source) -> Iterator[tuple[str | Path | Mapping[str, Any] | None, Mapping[str, str]]]:
    """``source`` as the name of a preset, a file or a table, and the environment that it is read with.

    An experiment that was made in a program is complete: the environment only names the folders of data. If it holds
    the content of trace files it is a file, which is gone afterwards. Otherwise they are looked for as for a preset.
    """
    if source is None or isinstance(source, str | Path):
        yield source, os.environ
    elif not isinstance(source, Experiment):
        yield plain(source, ""), without_settings(os.environ)
    elif source.lacks_traces or not source.named_files():
        yield source.table(), without_settings(os.environ)
    else:
        with tempfile.TemporaryDirectory(prefix="fedemu-") as folder:
            write_frozen(source, Path(folder))
            yield Path(folder) / CONFIG_FILE, without_settings(os.environ)


def overrides(values: Mapping[str, Any]) -> list[str]:
    """Keywords as overrides: ``local__lr=0.05`` becomes ``local.lr=0.05``.

    ``model`` and ``algorithm`` may be names instead of tables. A class or a function becomes the name by which other
    processes find it, also if a notebook's cell defines it. An object as ``data`` is stored first.
    """
    given = dict(values)
    if _holds_data(given.get("data")):
        given["data__dataset"] = given.pop("data")
    if not isinstance(given.get("data__dataset", ""), str | Path):
        given["data__dataset"] = store(given["data__dataset"], cache_folder(os.environ))
    written = []
    for key, value in given.items():
        named = f"{key}__name" if key in NAMED and not isinstance(value, Mapping) else key
        written.append(f"{named.replace('__', '.')}={toml_value(plain(value, named))}")
    return written


def _holds_data(data: Any) -> bool:
    """Whether a keyword ``data`` is a data set or its name, and no table of settings."""
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return bool({"x", "train"} & {*data})
    return data is not None


def plain(value: Any, setting: str) -> Any:
    """A value as TOML knows it, with names in place of classes and functions. ``setting`` is named in errors.

    Raises ConfigurationError for values that no setting can have.
    """
    match value:
        case Mapping():
            named = {key if isinstance(key, str) else name_of(key, setting): inner for key, inner in value.items()}
            return {key: plain(inner, f"{setting}__{key}" if setting else key) for key, inner in named.items()}
        case str() | bool() | int() | float():
            return value
        case Path():
            return str(value)
        case list() | tuple():
            return [plain(item, setting) for item in value]
        case _ if hasattr(value, "item") and getattr(value, "shape", None) == ():
            return value.item()  # a number of numpy
        case _ if callable(value):
            return name_of(value, setting)
    instead = "name a class or a function, or a plain value"
    if value is None:
        instead = "leave it out for the default"
    elif hasattr(value, "shape"):
        instead = "hand arrays over as a data set: data=(x, y)"
    raise ConfigurationError(f"{setting} = {short(value)} is no value of a setting; {instead}")


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings of experiments. Variables that name folders stay."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX) or name in NOT_SETTINGS}


def in_call(error: FedemuError) -> FedemuError:
    """The error of a call, whose sentence advises arguments of calls in place of options of ``fedemu run``.

    What the sentence quotes of an error of somebody's own code stays. The traceback is left out: IPython shows the
    frames of the caller.
    """
    cause = cause_of(error)
    if cause is None or not (isinstance(cause.__cause__ or cause, Elsewhere) or own_frames(cause)):
        error.args = (in_arguments(str(error)),)
    return error.with_traceback(None)


def in_arguments(sentence: str) -> str:
    """A sentence that advises options of ``fedemu run``, with the arguments of ``fedemu.run`` instead."""

    def argument(found: re.Match[str]) -> str:
        option, quoted, plain = found.groups()
        name = f"runtime__{option.replace('-', '_')}" if option in _RUNTIME else option
        value = quoted or plain
        if not value:
            return name
        return f"{name}={value if option in _RUNTIME and value.isdigit() else toml_value(value)}"

    return _OPTION.sub(argument, sentence)
