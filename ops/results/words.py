"""What a page tells of a run first: its settings in words, its date, and the command that makes it again."""

from __future__ import annotations

import itertools
import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedemu.coordinator.record.run import Run
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.layers import TAGS
from fedemu.ops.experiment.presets import part_names, preset, preset_names
from fedemu.ops.experiment.sources import CONFIG_FILE
from fedemu.ops.experiment.toml_text import toml_key, toml_value
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.wording import counted

Keys = tuple[str, ...]
Table = Mapping[str, Any]

_PARTITIONS = {"iid": "divided evenly", "dirichlet": "Dirichlet", "dirichlet_equal": "Dirichlet, equal sizes"}
_MOST_CHANGES = 8
"""With more changes of a preset than this, the command names the file of the run instead."""
_OWN_FLAGS = {"seed": "--seed", "rounds": "--rounds", "fleet.devices": "--devices"}


def at(table: Table, path: Keys) -> Any:
    """The value of a setting, None if the table lacks it."""
    value: Any = table
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def shown(value: Any) -> str:
    """The value of a setting in words."""
    match value:
        case bool() | None:
            return str(value).lower()
        case float():
            return f"{value:g}"
        case Mapping():
            first = [str(value[key]) for key in ("name", "kind") if key in value]
            return " ".join(
                [*first, *(f"{key} {shown(item)}" for key, item in value.items() if key not in {"name", "kind"})]
            )
        case list() | tuple():
            return "[" + ", ".join(map(shown, value)) + "]"
    return str(value)


def table_of(run: Run) -> Table:
    """The experiment's table as ``config.toml`` holds it, empty if there is none that can be read."""
    try:
        return tomllib.loads(run.config)
    except tomllib.TOMLDecodeError:
        return {}


def without_settings(directory: Path) -> str:
    """A sentence for people if no settings of a run can be read. Empty if there are some.

    A file without anything in it is what a failing disk leaves.
    """
    path = directory / CONFIG_FILE
    there = is_file(path)
    with suppress(OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        if there and tomllib.loads(path.read_text(encoding="utf-8")):
            return ""
    what = "holds no settings that can be read" if there else "is gone"
    return (
        f"{path} {what}, so no settings of the run are told; {'remove it and resume' if there else 'resume'} the run "
        f"(fedemu run --resume {shlex.quote(str(directory))}), which writes it back from the checkpoint"
    )


def settings_in_words(table: Table) -> dict[str, str]:
    """What a page tells of an experiment first, by name: method, data, model and so on.

    ``table`` is the experiment's, as ``config.toml`` holds it. A setting that an old file lacks is left out.
    """
    told = {
        "method": _method(at(table, ("algorithm",)) or {}),
        "data": _data(at(table, ("data",)) or {}),
        "stream": _stream(at(table, ("stream",)) or {}),
        "replay": _replay(at(table, ("replay",)) or {}),
        "model": shown(at(table, ("model",)) or {}),
        "devices": _devices(at(table, ("fleet",)) or {}),
        "local training": _local(at(table, ("local",)) or {}),
    }
    return {name: words for name, words in told.items() if words}


def command_again(table: Table, directory: Path) -> str:
    """The command that makes the run of an experiment again: of its preset if it is one, or else of its file."""
    try:
        wanted = Experiment.parse(table).table()
    except ConfigurationError:  # another version of fedemu has written it
        wanted = {}
    for name in _names_of_presets(str(table.get("name", ""))) if wanted else ():
        try:
            written = preset(name)
            own = Experiment.parse(written).table()
        except ConfigurationError:  # its parts go together only with settings that were given beside them
            continue
        changes = dict(_changes(own, wanted))
        if "fleet.devices" in changes and at(written, ("fleet", "participation")) is not None:
            changes |= {"fleet.per_round": at(wanted, ("fleet", "per_round"))}  # the share of other devices is another
        if len(changes) > _MOST_CHANGES or None in changes.values():
            continue
        command = ["fedemu", "run", name]
        for key, value in changes.items():
            command += [_OWN_FLAGS[key], str(value)] if key in _OWN_FLAGS else ["--set", f"{key}={toml_value(value)}"]
        return shlex.join(command)
    return shlex.join(["fedemu", "run", os.path.normpath(directory / CONFIG_FILE)])


def date_of(run: Run) -> str:
    """The date and the time of a run in UTC: of its end, or if it has none, of the last row that it wrote."""
    ended = run.summary.get("ended")
    with suppress(ValueError):  # the summary may be damaged
        if ended is not None:
            return _readable(datetime.fromisoformat(str(ended)))
    written = [run.path / name for name in ("metrics.jsonl", CONFIG_FILE) if is_file(run.path / name)]
    return _readable(datetime.fromtimestamp(written[0].stat().st_mtime, UTC)) if written else ""


def _readable(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _method(algorithm: Table) -> str:
    options = _options(algorithm.get("options") or {})
    words = f"{algorithm.get('name', '')}{f' ({options})' if options else ''}"
    loss = str(algorithm.get("loss", "cross_entropy"))
    if loss != "cross_entropy":
        words += f", loss {loss}"
    for name, of_term in (algorithm.get("terms") or {}).items():
        inner = _options(of_term)
        words += f", local term {name}{f' ({inner})' if inner else ''}"
    return words


def _data(data: Table) -> str:
    partition: Table = data.get("partition") or {}
    kind = str(partition.get("kind", ""))
    words = [str(data.get("dataset", "")), _PARTITIONS.get(kind, kind)]
    if "alpha" in partition:
        words[-1] += f" alpha {shown(partition['alpha'])}"
    if "per_device" in partition:
        words[-1] += f", {partition['per_device']} per device"
    return ", ".join(word for word in words if word)


def _stream(stream: Table) -> str:
    kind = stream.get("kind", "static")
    if kind == "static":
        return "static: all samples from the first round on"
    noun, count = next(((noun, stream[noun]) for noun in ("tasks", "periods") if noun in stream), ("periods", 0))
    each = stream.get(f"rounds_per_{noun.removesuffix('s')}", 0)
    return f"{kind}: {counted(count, noun.removesuffix('s'))} of {counted(each, 'round')}"


def _replay(replay: Table) -> str:
    strategy = str(replay.get("strategy", "none"))
    if strategy == "none":
        return ""
    return (
        f"{strategy.replace('_', ' ')}, {counted(replay.get('budget') or replay.get('capacity') or 0, 'sample')} kept"
    )


def _devices(fleet: Table) -> str:
    all_of_them, each = fleet.get("devices"), fleet.get("per_round")
    if not all_of_them:
        return ""
    return f"{all_of_them:,}{f', of which {each:,} take part in a round' if each else ''}"


def _local(local: Table) -> str:
    if not local:
        return ""
    length = counted(local["steps"], "step") if local.get("steps") else counted(local.get("epochs", 0), "epoch")
    return f"{length}, batches of {local.get('batch_size')}, learning rate {shown(local.get('lr'))}"


def _options(table: Table) -> str:
    return ", ".join(f"{key} {shown(value)}" for key, value in table.items())


def _names_of_presets(name: str) -> Iterator[str]:
    """The presets that make an experiment of this name: ``digits+METHOD`` for ``digits-METHOD``."""
    parts = part_names()
    for setting in preset_names():
        if name == setting:
            yield setting
        elif name.startswith(f"{setting}-"):
            rest = name.removeprefix(f"{setting}-")
            for several in itertools.chain(((part,) for part in parts), itertools.permutations(parts, 2)):
                if "-".join(several) == rest:
                    yield "+".join((setting, *several))


def _changes(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The settings in which ``new`` differs from ``old``, by their full keys. None for one that ``new`` lacks.

    A table of another kind and another model are one setting, because ``merge`` lays nothing of them over the old one.
    Nor does it keep the options of a method when it lays another one over it.
    """
    tag = TAGS.get(path) if path != "algorithm" else None
    if path == "algorithm" and old["name"] != new["name"]:
        old = {**old, "options": {}}
    if isinstance(old, Mapping) and isinstance(new, Mapping) and (tag is None or old.get(tag) == new.get(tag)):
        for key in dict.fromkeys([*old, *new]):
            yield from _changes(old.get(key), new.get(key), f"{path}.{toml_key(key)}" if path else key)
    elif old != new:
        yield path, new
