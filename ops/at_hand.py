"""Which data the presets need, and which of them are on this machine. Nothing is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemu.ops.data.corpora import source_of
from fedemu.ops.data.source import entry_of, locate
from fedemu.ops.experiment import Data, Experiment
from fedemu.ops.homes import cache_folder, data_folder, expanded, named_folder
from fedemu.protocol.errors import DataError
from fedemu.protocol.host.paths import is_file, is_folder


@dataclass(frozen=True)
class Needed:
    """What a preset reads: its data set, and the trace files that it names. ``missing`` are those that are not here."""

    names: tuple[str, ...]
    missing: tuple[str, ...]


def needed(table: Mapping[str, Any], environment: Mapping[str, str]) -> Needed:
    """What the experiment of a preset reads, and what of it is not here."""
    dataset = table.get("data", {}).get("dataset", Data().dataset)
    files = list(dict.fromkeys(_files(table.get("availability")) + _files(table.get("profile"))))
    folder = data_folder(environment)
    here = [place for place in (Path.cwd(), folder) if place is not None]
    missing = [name for name in files if not any(is_file(place / name) for place in here)]
    if not _is_here(dataset, table, folder, environment):
        missing.insert(0, dataset)
    return Needed((dataset, *files), tuple(missing))


def where_looked(environment: Mapping[str, str]) -> str:
    """Where data are looked for, in words."""
    folder = data_folder(environment)
    if folder is None:
        chosen = "FEDEMU_DATA is not set"
    else:
        chosen = f"FEDEMU_DATA = {folder}{'' if is_folder(folder) else ', which is no folder'}"
    decoded, hub = cache_folder(environment), _hub_folder(environment)
    return f"this folder; {chosen}; decoded data in {decoded}; the data of the Hugging Face hub in {hub}"


def _is_here(dataset: str, table: Mapping[str, Any], folder: Path | None, environment: Mapping[str, str]) -> bool:
    """Whether a data set is built in, a folder, a file, or something of the hub that was loaded or decoded before.

    It has to be decoded as the experiment of ``table`` reads it. What was decoded from a folder is not the hub's.
    """
    try:
        place = locate(dataset, folder)
    except DataError:
        return False
    if place.kind != "hub":
        return True
    experiment = Experiment.parse(table)
    source = source_of(experiment.data, experiment.stream)
    if is_file(entry_of(source, place, cache_folder(environment)) / "meta.json"):
        return True
    return is_folder(_hub_folder(environment) / f"datasets--{place.where.replace('/', '--')}")


def _hub_folder(environment: Mapping[str, str]) -> Path:
    """Where the Hugging Face hub keeps what it has loaded."""
    if named := environment.get("HF_HUB_CACHE"):
        return expanded(named)
    return named_folder(environment, "HF_HOME", "XDG_CACHE_HOME", ".cache", "huggingface") / "hub"


def _files(table: Any) -> list[str]:
    """The files that a table names, at any depth."""
    if not isinstance(table, Mapping):
        return []
    own = [table["file"]] if isinstance(table.get("file"), str) else []
    return own + [name for value in table.values() for name in _files(value)]
