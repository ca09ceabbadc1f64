"""Where an experiment comes from: a file or a preset, then the environment, then the command line, each over the last.

Also reads the trace files that it names, and writes and reads the frozen experiment of a run directory.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedemu.device import traces
from fedemu.ops.config import (
    AUTO,
    AvailabilityTrace,
    ComputeTrace,
    Experiment,
    NetworkTrace,
    ProfileRows,
    Runtime,
    Traces,
)
from fedemu.ops.presets import DEFAULT, preset_path, presets
from fedemu.protocol.errors import ConfigurationError

PREFIX = "FEDEMU_"
NOT_SETTINGS = frozenset({"FEDEMU_DATA", "FEDEMU_CACHE", "FEDEMU_STATE"})
"""Folders, not settings: where data and trace files are looked for, where decoded data and devices' state are kept."""
CONFIG_FILE = "config.toml"
TRACES_FILE = "traces.json"

_NETWORK_COLUMNS = {
    "down_kbps": ("down_mean_kBps", "down_std_kBps"),
    "up_kbps": ("up_mean_kBps", "up_std_kBps"),
}
_ROUNDS = "rounds"


def load_experiment(
    source: str | Path | None, overrides: Sequence[str], environment: Mapping[str, str]
) -> tuple[Experiment, Runtime]:
    """Read an experiment and this machine's settings from a TOML file, a preset's name, or None for the default preset.

    ``overrides`` are ``section.key=value`` with a TOML value (a bare word is text). Files that the experiment names
    are looked for beside the TOML (beside the working directory for a preset), then in FEDEMU_DATA. Raises
    ConfigurationError.
    """
    path, is_preset = _find(source)
    layers = [_read_toml(path), _from_environment(environment), _from_overrides(overrides)]
    table: dict[str, Any] = {}
    for layer in layers:
        table = _merge(table, layer)
    runtime = Runtime.parse(_section(table.pop("runtime", {}), "runtime"))
    experiment = Experiment.parse(table)
    folders = [Path.cwd() if is_preset else path.parent]
    if environment.get("FEDEMU_DATA"):
        folders.append(Path(environment["FEDEMU_DATA"]))
    frozen = None if is_preset else path.parent / TRACES_FILE
    return _with_traces(experiment, folders, frozen), runtime


def write_frozen(experiment: Experiment, directory: Path) -> None:
    """Write ``config.toml``, and ``traces.json`` where the experiment follows trace files; loading reads both."""
    if experiment.traces != Traces():
        content = {"of": _named_files(experiment), "traces": experiment.traces.model_dump(mode="json")}
        _write(directory / TRACES_FILE, json.dumps(content, allow_nan=False))
    _write(directory / CONFIG_FILE, experiment.to_toml())


def _write(path: Path, text: str) -> None:
    """Whole or not at all, so that a run that is killed here leaves nothing half-written."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_frozen(directory: Path) -> Experiment:
    """The experiment of a run directory, exactly as it was written."""
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise ConfigurationError(f"{directory} is no run directory: it has no {CONFIG_FILE}")
    experiment, _ = load_experiment(path, (), {})
    return experiment


def check_resume(
    frozen: Experiment, overrides: Sequence[str], environment: Mapping[str, str]
) -> tuple[Experiment, Runtime]:
    """What a resumed run goes by: the frozen experiment, at most with more rounds, and this machine's settings anew.

    Any other setting that differs raises ConfigurationError: it would make another experiment.
    """
    table = _merge(_merge(frozen.table(), _from_environment(environment)), _from_overrides(overrides))
    runtime = Runtime.parse(_section(table.pop("runtime", {}), "runtime"))
    wanted = Experiment.parse(table)
    for path, old, new in _differences(frozen.table(), wanted.table()):
        if path != _ROUNDS:
            raise ConfigurationError(
                f"{path} can't change from {old} to {new} when a run is resumed: only rounds may grow; "
                f"start a new run for another experiment"
            )
        if new < old:
            raise ConfigurationError(
                f"rounds can't shrink from {old} to {new} when a run is resumed; only more rounds are possible"
            )
    return wanted.model_copy(update={"traces": frozen.traces}), runtime


def _find(source: str | Path | None) -> tuple[Path, bool]:
    """The TOML file, and whether it is a preset's. A preset's bare name goes before a file or folder of that name."""
    if source is None:
        return preset_path(DEFAULT), True
    if str(source) in dict(presets()):
        return preset_path(str(source)), True
    path = Path(source)
    if path.is_file():
        return path, False
    if path.is_dir():
        if (path / CONFIG_FILE).is_file():
            raise ConfigurationError(
                f"{path} is a folder; name its {path / CONFIG_FILE}, or continue it with --resume {path}"
            )
        raise ConfigurationError(f"{path} is a folder, not an experiment file")
    if path.suffix == ".toml" and path.parent != Path("."):
        raise ConfigurationError(f"there is no file {path}")
    return preset_path(str(source)), True


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {str(error)[0].lower()}{str(error)[1:]}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} can't be read: {error}") from None


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """``FEDEMU_LOCAL__LR=0.05`` is ``local.lr``: two underscores part a table from its key."""
    layer: dict[str, Any] = {}
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in NOT_SETTINGS:
            keys = name.removeprefix(PREFIX).lower().split("__")
            _require_table_of(name, keys)
            _place(layer, keys, _value(environment[name], name), name)
    return layer


def _require_table_of(variable: str, keys: Sequence[str]) -> None:
    tables = [*Experiment.model_fields, "runtime"]
    if keys[0] not in tables:
        guess = difflib.get_close_matches(keys[0], tables, n=1)
        meant = PREFIX + "__".join([*guess, *keys[1:]]).upper()
        hint = f"did you mean {meant}?" if guess else "unset it, or see docs/configuration.md for the names"
        raise ConfigurationError(f"the environment variable {variable} names no setting; {hint}")


def _from_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        keys = [part.strip() for part in key.split(".")]
        if not equals or not all(keys):
            raise ConfigurationError(f'"{override}" is no override; write section.key=value, as in local.lr=0.05')
        _place(layer, keys, _value(text.strip(), key), override)
    return layer


def _value(text: str, name: str) -> Any:
    """A TOML value; what is none, and does not look like one, is text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if text[:1] in {"{", "[", '"', "'"}:
            raise ConfigurationError(f"{name} = {text} is not a TOML value; check its brackets and quotes") from None
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _place(layer: dict[str, Any], keys: Sequence[str], value: Any, origin: str) -> None:
    here = layer
    for key in keys[:-1]:
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise ConfigurationError(f'"{origin}" sets a key inside {key}, which is also set to a single value')
    here[keys[-1]] = value


def _section(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} = {value} must be a table")
    return value


def _merge(below: Mapping[str, Any], above: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Settings of ``above`` over those of ``below``, table by table.

    A table that becomes another kind (or a model or method that becomes another) starts from its own defaults, and
    ``per_round`` and ``participation`` displace each other: so one setting on the command line is enough to change
    them.
    """
    kept = dict(below)
    if "kind" in above and above["kind"] != below.get("kind"):
        kept = {}
    if path == "model" and above.get("name", below.get("name")) != below.get("name"):
        kept = {}
    if path == "algorithm" and above.get("name", below.get("name")) != below.get("name"):
        kept.pop("options", None)
    if path == "fleet" and above.keys() & {"per_round", "participation"}:
        kept = {key: value for key, value in kept.items() if key not in {"per_round", "participation"}}
    for key, value in above.items():
        old = kept.get(key)
        inner = f"{path}.{key}" if path else key
        kept[key] = _merge(old, value, inner) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return kept


def _differences(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            difference
            for key in dict.fromkeys([*old, *new])
            for difference in _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if old == new else [(path, old, new)]


def _with_traces(experiment: Experiment, folders: Sequence[Path], frozen: Path | None) -> Experiment:
    """The experiment with the content of the files that it names; a run directory's copy of them goes first."""
    named = _named_files(experiment)
    if not named:
        return experiment
    kept = _frozen_traces(frozen, named) if frozen is not None and frozen.is_file() else None
    return experiment.model_copy(update={"traces": kept or _read_traces(experiment, folders)})


def _named_files(experiment: Experiment) -> dict[str, Any]:
    """The tables that name trace files, by their path."""
    tables: dict[str, Any] = {"availability": experiment.availability, **dict(experiment.profile)}
    return {
        name: table.model_dump(mode="json")
        for name, table in tables.items()
        if isinstance(table, AvailabilityTrace | ComputeTrace | NetworkTrace)
    }


def _frozen_traces(path: Path, named: Mapping[str, Any]) -> Traces | None:
    try:
        content = json.loads(path.read_bytes())
        return Traces.model_validate_json(json.dumps(content["traces"])) if content["of"] == named else None
    except (OSError, ValueError, KeyError, TypeError, ValidationError):
        raise ConfigurationError(f"{path} is damaged; restore it, or delete it to read the trace files again") from None


def _read_traces(experiment: Experiment, folders: Sequence[Path]) -> Traces:
    content: dict[str, Any] = {"profile": {}}
    if isinstance(experiment.availability, AvailabilityTrace):
        wanted = experiment.availability
        path = _locate("availability.file", wanted.file, folders)
        recorded = traces.read_availability(path, wanted.policy, wanted.state, wanted.bootstrap)
        content |= {"availability": recorded.devices, "last_event": recorded.last_event}
    for key, quantity in dict(experiment.profile).items():
        if isinstance(quantity, ComputeTrace | NetworkTrace):
            rows = _read_profile(key, quantity, _locate(f"profile.{key}.file", quantity.file, folders))
            content["profile"][key] = ProfileRows(
                file=quantity.file, values=rows.values, deviations=rows.deviations, weights=rows.weights
            )
    return Traces(**content)


def _read_profile(key: str, quantity: ComputeTrace | NetworkTrace, path: Path) -> traces.Rows:
    if isinstance(quantity, ComputeTrace):
        return traces.read_compute(path, quantity.column, quantity.median, quantity.weight)
    column, deviation = _NETWORK_COLUMNS[key]
    if quantity.column != AUTO:
        column, deviation = quantity.column, ""
    if quantity.deviation != AUTO:
        deviation = quantity.deviation
    return traces.read_network(path, column, deviation, quantity.weight)


def _locate(setting: str, name: str, folders: Sequence[Path]) -> Path:
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    looked = " and ".join(str(folder) for folder in folders)
    hint = "" if len(folders) > 1 else "; set FEDEMU_DATA to the folder that holds it"
    raise ConfigurationError(f'{setting} = "{name}" is not there: looked in {looked}{hint}')
