"""The experiment that a call of ``fedemu.run`` means, from what a program passes."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedemu.ops.data.cache import cache_folder
from fedemu.ops.data.own.given import store
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import NOT_SETTINGS, PREFIX, load_experiment, write_frozen
from fedemu.ops.experiment.toml_text import toml_text

Source = Experiment | Mapping[str, Any] | str | Path | None
"""An experiment as a program has it: an object, a table, the name of a preset, a file, or None for ``digits``."""


def load(source: Source, settings: list[str]) -> tuple[Experiment, Runtime]:
    """Check an experiment with the overrides ``settings``. Raises ConfigurationError if something is wrong."""
    with named(source) as (name, environment):
        return load_experiment(name, settings, environment)


@contextmanager
def named(source: Source) -> Iterator[tuple[str | Path | None, Mapping[str, str]]]:
    """``source`` as the name of a preset or of a file, and the environment that it is read with.

    An experiment that was made in a program is complete: the environment only names the folders of data. Its file is
    gone afterwards.
    """
    if source is None or isinstance(source, str | Path):
        yield source, os.environ
        return
    with tempfile.TemporaryDirectory(prefix="fedemu-") as folder:
        if isinstance(source, Experiment):
            write_frozen(source, Path(folder))
        else:
            (Path(folder) / "config.toml").write_text(toml_text(source), encoding="utf-8")
        yield Path(folder) / "config.toml", without_settings(os.environ)


def overrides(values: Mapping[str, Any]) -> list[str]:
    """Keywords as overrides: ``local__lr=0.05`` becomes ``local.lr=0.05``. An object as ``data`` is stored first."""
    written = dict(values)
    if _holds_data(written.get("data")):
        written["data__dataset"] = written.pop("data")
    if not isinstance(written.get("data__dataset", ""), str | Path):
        written["data__dataset"] = store(written["data__dataset"], cache_folder(os.environ))
    return [f"{key.replace('__', '.')}={toml(value)}" for key, value in written.items()]


def _holds_data(data: Any) -> bool:
    """Whether a keyword ``data`` is a data set or its name, and no table of settings."""
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return bool({"x", "train"} & {*data})
    return data is not None


def without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings of experiments. Variables that name folders stay."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX) or name in NOT_SETTINGS}


def toml(value: Any) -> str:
    """A value as TOML. Tables are written inline."""
    return toml_text({"": {"v": str(value) if isinstance(value, Path) else value}}).partition("v = ")[2].strip()
