"""Reads an experiment: from a file or a preset, then from the environment, then from the command line.

Each source is laid over the one before it. The frozen experiment of a run directory is written and read here, too.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple

from fedemu.ops.experiment.experiment import Experiment
from fedemu.ops.experiment.layers import merge
from fedemu.ops.experiment.mistakes import setting_paths, shown
from fedemu.ops.experiment.near import near
from fedemu.ops.experiment.presets import DEFAULT, JOINT, is_preset, parts_of, preset, preset_names
from fedemu.ops.experiment.read_toml import read_toml
from fedemu.ops.experiment.runtime import Runtime, Track
from fedemu.ops.experiment.tables.section import FILLED
from fedemu.ops.experiment.traces import TRACES_FILE, traces_text, with_traces
from fedemu.ops.experiment.without_effect import WithoutEffect
from fedemu.ops.homes import data_folder
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import write_whole
from fedemu.protocol.host.paths import exists, is_file, is_folder

PREFIX = "FEDEMU_"
NOT_SETTINGS = ("FEDEMU_DATA", "FEDEMU_CACHE", "FEDEMU_STATE", "FEDEMU_KEYS", "FEDEMU_SENT")
"""Environment variables that are no settings. They name folders: data, cache, the devices' state, keys, sent data."""
CONFIG_FILE = "config.toml"

_ROUNDS = "rounds"
_Setting = tuple[list[str], Any, str]
"""The parts of the key of a setting, its value, and the variable or the override that gives it."""
_MACHINE = ("runtime", "track")
"""The tables that belong to a machine."""


class _Layers(NamedTuple):
    """What the sources of an experiment say, one laid over the other.

    ``file`` is the experiment's, if it is read from one. ``table`` holds all settings, ``given`` those of the overrides
    alone, and ``chosen`` those that somebody has set: in a file, by a part of a preset, by an override, or by a
    variable of the environment. A machine's variables are not among the last, because they stand for all of its runs.
    """

    file: Path | None
    table: dict[str, Any]
    given: dict[str, Any]
    chosen: dict[str, Any]


def load_experiment(
    source: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    without_effect: WithoutEffect | None = None,
) -> tuple[Experiment, Runtime]:
    """Read an experiment and this machine's settings. ``source`` is a file, a preset, a table, or None (``digits``).

    ``overrides`` are ``section.key=value`` with a TOML value; a bare word is text. Trace files that the experiment
    names are looked for beside the TOML file (for a preset: in the working directory), then in FEDEMU_DATA.
    ``without_effect`` gathers what somebody has set. Raises ConfigurationError if a file is missing or a setting is
    wrong.
    """
    file, table, given, chosen = _layered(source, overrides, environment)
    try:
        runtime = _runtime(table)
        experiment = Experiment.parse(table)
    except ConfigurationError as error:
        raise _with_variable(error, environment, given) from None
    if without_effect is not None:
        without_effect.look(experiment, runtime, chosen)
    folders = [file.parent if file else Path.cwd()]
    if data := data_folder(environment):
        folders.append(data)
    # Beside any other file, traces.json is somebody's own.
    frozen = file.with_name(TRACES_FILE) if file and file.name == CONFIG_FILE else None
    return with_traces(experiment, folders, frozen), runtime


def seed_of(
    source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str], environment: Mapping[str, str]
) -> int:
    """The seed of an experiment, of which other settings may still be missing or wrong."""
    seed = _layered(source, overrides, environment).table.get("seed")
    return seed if isinstance(seed, int) else int(Experiment.model_fields["seed"].default)


def write_frozen(experiment: Experiment, directory: Path) -> None:
    """Write ``config.toml``, and ``traces.json`` if the experiment names trace files.

    ``load_experiment`` reads both.
    """
    if experiment.named_files():
        write_whole(directory / TRACES_FILE, traces_text(experiment), durable=True)
    write_whole(directory / CONFIG_FILE, experiment.to_toml(), durable=True)


def read_frozen(directory: Path) -> Experiment:
    """Read the experiment of a run directory. Raises ConfigurationError if there is none."""
    path = directory / CONFIG_FILE
    if not is_file(path):
        raise ConfigurationError(f"{directory} is no run directory: it has no {CONFIG_FILE}")
    experiment, _ = load_experiment(path, (), {})
    return experiment


def check_resume(
    frozen: Experiment, overrides: Sequence[str], environment: Mapping[str, str]
) -> tuple[Experiment, Runtime]:
    """The experiment of a resumed run, and this machine's settings, which are read anew.

    The experiment is the frozen one, perhaps with more rounds. Any other setting that differs raises
    ConfigurationError, because it would make another experiment.
    """
    table, _ = _laid(_laid(frozen.table(), _from_environment(environment))[0], map(_parsed, overrides))
    runtime = _runtime(table)
    wanted = Experiment.parse(table)
    for path, old, new in differences(frozen.table(), wanted.table()):
        if path != _ROUNDS:
            raise ConfigurationError(
                f"{path} can't change from {_shown(old)} to {_shown(new)} when a run is resumed: only rounds may grow; "
                f"start a new run for another experiment"
            )
        if new < old:
            raise ConfigurationError(
                f"rounds can't shrink from {old} to {new} when a run is resumed; only more rounds are possible"
            )
    return wanted.model_copy(update={"traces": frozen.traces}), runtime


def _layered(
    source: str | Path | Mapping[str, Any] | None, overrides: Sequence[str], environment: Mapping[str, str]
) -> _Layers:
    file, table, chosen = _open(source)
    variables, given = _from_environment(environment), [_parsed(override) for override in overrides]
    table, _ = _laid(table, variables)
    chosen, _ = _laid(chosen, [variable for variable in variables if variable[0][0] not in _MACHINE])
    return _Layers(file, *_laid(table, given), _laid(chosen, given)[0])


def _runtime(table: dict[str, Any]) -> Runtime:
    """This machine's settings. They are taken out of the table: ``[runtime]``, and ``[track]``, which it holds here."""
    own = _section(table.pop("runtime", {}), "runtime")
    if "track" in own:
        raise ConfigurationError("runtime.track is no setting; [track] is a table of its own, so write track.to")
    track = Track.parse(_section(table.pop("track", {}), "track"))
    return Runtime.parse(own).model_copy(update={"track": track})


def _shown(value: Any) -> str:
    return "nothing" if value is None else shown(value)


def _open(source: str | Path | Mapping[str, Any] | None) -> tuple[Path | None, dict[str, Any], dict[str, Any]]:
    """The experiment's file, its table, and what of it somebody has chosen himself: not a preset's.

    A preset or a table has no file (None). The name of a preset means the preset, even if there is a file or a
    folder of that name. Parts may follow a file as they follow a preset.
    """
    if isinstance(source, Mapping):
        return None, dict(source), dict(source)
    if source is None or is_preset(str(source)):
        return None, preset(name := str(source or DEFAULT)), parts_of(name)
    path = Path(source)
    if is_folder(path):
        if is_file(path / CONFIG_FILE):
            again = shlex.quote(str(path))
            raise ConfigurationError(f"{path} is a folder; name {path / CONFIG_FILE}, or go on with --resume {again}")
        raise ConfigurationError(f"{path} is a folder, not an experiment's file")
    if _exists(path):
        table = read_toml(path)
        return path, table, table
    if path.suffix == ".toml":
        raise ConfigurationError(f"there is no file {path}{_instead_of(path)}")
    file, joint, parts = str(source).partition(f".toml{JOINT}")
    if joint and _exists(path := Path(f"{file}.toml")):
        return path, *_followed(read_toml(path), parts)
    return None, preset(str(source)), {}


def _followed(table: dict[str, Any], parts: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file's table with parts laid over it, which are joined as behind a preset. Twice: somebody has chosen it all.

    Its name is that of the file and of the parts, joined by dashes.
    """
    name = table.get("name", Experiment.model_fields["name"].default)
    whole = merge(table, parts_of(f"{JOINT}{parts}")) | {"name": f"{name}-{parts.replace(JOINT, '-')}"}
    return whole, whole


def _exists(path: Path) -> bool:
    """Whether there is a file. A pipe of the shell, as in ``fedemu run <(...)``, is one, too."""
    try:
        return exists(path)
    except (OSError, ValueError):
        return False


def _instead_of(path: Path) -> str:
    """What to do where there is no file of this name."""
    folder = path.parent
    if not is_folder(folder):
        return "; there is no such folder"
    files = {file.stem: str(file) for file in folder.glob("*.toml")}
    for known in (files, {name: name for name in preset_names()} if folder == Path() else {}):
        if found := near(path.stem, known):
            return f"; did you mean {known[found[0]]}?"
    return f"; `fedemu init {shlex.quote(str(path))}` writes one to start from"


def _from_environment(environment: Mapping[str, str]) -> list[_Setting]:
    """The settings in the environment. ``FEDEMU_LOCAL__LR=0.05`` is ``local.lr``: two underscores stand for the dot."""
    unknown = unknown_variables(environment)
    if unknown:
        raise ConfigurationError(unknown[0])
    return [(_keys_of(name), toml_of(environment[name], name), name) for name in _variables(environment)]


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A sentence for each environment variable that begins like one of fedemu, and is none: it is probably mistyped."""
    tables = {*Experiment.model_fields, *_MACHINE}.difference(FILLED)
    return [
        f"the environment variable {name} names no setting and no folder{_hint(name)}"
        for name in _variables(environment)
        if _keys_of(name)[0] not in tables
    ]


def machine_paths() -> list[str]:
    """The settings of a machine by dotted key."""
    own = setting_paths(Runtime)
    return [path if path.partition(".")[0] == "track" else f"runtime.{path}" for path in own]


def _hint(variable: str) -> str:
    """The variable that was probably meant: with the same last word, or the nearest one."""
    paths = [*setting_paths(Experiment), *machine_paths()]
    known = [*NOT_SETTINGS, *(PREFIX + path.replace(".", "__").upper() for path in paths)]
    word = variable.removeprefix(PREFIX)
    meant = [name for name in known if word and name.rpartition("__")[2] == word.upper()]
    # The common beginning would make all of them alike.
    meant = meant or [PREFIX + name for name in near(word, [name.removeprefix(PREFIX) for name in known])]
    return f"; did you mean {meant[0]}?" if meant else "; unset it, or see docs/configuration.md for the names"


def _variables(environment: Mapping[str, str]) -> list[str]:
    return [name for name in sorted(environment) if name.startswith(PREFIX) and name not in NOT_SETTINGS]


def _keys_of(variable: str) -> list[str]:
    return variable.removeprefix(PREFIX).lower().split("__")


def _with_variable(
    error: ConfigurationError, environment: Mapping[str, str], given: Mapping[str, Any]
) -> ConfigurationError:
    """The error, with the name of the environment variable that has set what it is about, if one has."""
    for name in _variables(environment):
        path = ".".join(_keys_of(name))
        if re.match(rf"{re.escape(path)}\b", str(error)) and not _has(given, _keys_of(name)):
            return ConfigurationError(f"{error} (set by the environment variable {name})")
    return error


def _has(table: Any, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(table, Mapping) or key not in table:
            return False
        table = table[key]
    return True


def _parsed(override: str) -> _Setting:
    key, equals, text = override.partition("=")
    keys = _parts_of(key)
    if not equals or not all(keys):
        raise ConfigurationError(f'"{override}" is no override; write section.key=value, as in local.lr=0.05')
    return keys, toml_of(text.strip(), key), override


def _parts_of(key: str) -> list[str]:
    """The parts of a dotted key. One with dots of its own, such as the name of a file, is in TOML's quotation marks."""
    if '"' in key or "'" in key:
        with contextlib.suppress(ValueError):
            found, parts = tomllib.loads(f"{key} = 0"), []
            while isinstance(found, dict):
                ((part, found),) = found.items()
                parts.append(part)
            return parts
    return [part.strip() for part in key.split(".")]


def toml_of(text: str, name: str) -> Any:
    """The TOML value that a text says. ``name`` is said in errors.

    Text that is no TOML value is taken as text, unless it begins like a table, a list or a quotation. So are dates and
    times, which no setting takes.
    """
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        if text[:1] in {"{", "[", '"', "'"}:
            raise ConfigurationError(f"{name} = {text} is not a TOML value; check its brackets and quotes") from None
        return text
    return parsed["value"] if len(parsed) == 1 and not isinstance(parsed["value"], date | time) else text


def _laid(table: dict[str, Any], settings: Iterable[_Setting]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The table with settings laid over it, and the layer of these settings alone.

    What is set inside an empty table does not meet what the table below has there.
    """
    layer: dict[str, Any] = {}
    for keys, value, origin in settings:
        _place(layer, keys, value, origin)
        for path in _empty_tables(value, keys):
            table = _emptied(table, path)
    return merge(table, layer), layer


def _emptied(table: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The table without the keys of the table at ``path``, if it has one."""
    key, *inner = path
    if not isinstance(table.get(key), Mapping):
        return dict(table)
    return {**table, key: _emptied(table[key], inner) if inner else {}}


def _empty_tables(value: Any, keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """The keys of the empty tables in a value."""
    if value == {}:
        yield keys
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _empty_tables(inner, [*keys, key])


def _place(layer: dict[str, Any], keys: Sequence[str], value: Any, origin: str) -> None:
    """Lay one setting over those of ``layer``. A table is laid over the table that is there."""
    here = layer
    for key in keys[:-1]:
        here = here.setdefault(key, {})
        if not isinstance(here, dict):
            raise ConfigurationError(f'"{origin}" sets a key inside {key}, which is also set to a single value')
    old = here.get(keys[-1])
    if isinstance(old, dict) and isinstance(value, dict) and value:
        value = merge(old, value, ".".join(keys))
    here[keys[-1]] = value


def _section(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} = {value} must be a table")
    return value


def differences(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """The settings in which two tables differ: the dotted key, the old value and the new one, None if none is set."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            difference
            for key in dict.fromkeys([*old, *new])
            for difference in differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if old == new else [(path, old, new)]
