"""Finds and reads the trace files that an experiment names. Their content becomes part of the experiment."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedemu.ops.experiment import trace_files
from fedemu.ops.experiment.experiment import Experiment
from fedemu.ops.experiment.tables.fleet import AvailabilityTrace, ComputeTrace, NetworkTrace, ProfileRows, Traces
from fedemu.ops.experiment.tables.section import AUTO
from fedemu.ops.homes import expanded
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file

TRACES_FILE = "traces.json"
"""The file beside the ``config.toml`` of a run directory that holds the content of its trace files."""

_NETWORK_COLUMNS = {
    "down_kbps": ("down_mean_kBps", "down_std_kBps"),
    "up_kbps": ("up_mean_kBps", "up_std_kBps"),
}


def with_traces(experiment: Experiment, folders: Sequence[Path], frozen: Path | None = None) -> Experiment:
    """The experiment with the content of its trace files, which are looked for in ``folders``, in this order.

    ``frozen`` is a ``traces.json``. It is taken instead, if it was written from the same settings. Raises
    ConfigurationError if a file is missing or cannot be read.
    """
    named = _named_tables(experiment)
    if not named:
        return experiment
    kept = _frozen_traces(frozen, named) if frozen is not None and is_file(frozen) else None
    return experiment.model_copy(update={"traces": kept or _read_traces(experiment, folders)})


def traces_text(experiment: Experiment) -> str:
    """The text of ``traces.json``: the content of the trace files, and the settings that named them."""
    content = {"of": _named_tables(experiment), "traces": experiment.traces.model_dump(mode="json")}
    return json.dumps(content, allow_nan=False)


def _named_tables(experiment: Experiment) -> dict[str, Any]:
    return {key: table.model_dump(mode="json") for key, table in experiment.named_files().items()}


def _frozen_traces(path: Path, named: Mapping[str, Any]) -> Traces | None:
    try:
        content = json.loads(path.read_bytes())
        return Traces.model_validate_json(json.dumps(content["traces"])) if content["of"] == named else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError):
        raise ConfigurationError(f"{path} is damaged; restore it, or delete it to read the trace files again") from None


def _read_traces(experiment: Experiment, folders: Sequence[Path]) -> Traces:
    content: dict[str, Any] = {"profile": {}}
    for key, table in experiment.named_files().items():
        if isinstance(table, AvailabilityTrace):
            path = _locate("availability.file", table.file, folders)
            recorded = trace_files.read_availability(path, table.policy, table.state, table.bootstrap)
            content |= {"availability": recorded.devices, "last_event": recorded.last_event}
        else:
            rows = _read_profile(key, table, _locate(f"profile.{key}.file", table.file, folders))
            content["profile"][key] = ProfileRows(
                file=table.file, values=rows.values, deviations=rows.deviations, weights=rows.weights
            )
    return Traces(**content)


def _read_profile(key: str, quantity: ComputeTrace | NetworkTrace, path: Path) -> trace_files.Rows:
    if isinstance(quantity, ComputeTrace):
        return trace_files.read_compute(path, quantity.column, quantity.median, quantity.weight)
    column, deviation = _NETWORK_COLUMNS[key]
    if quantity.column != AUTO:
        column, deviation = quantity.column, ""
    if quantity.deviation != AUTO:
        deviation = quantity.deviation
    return trace_files.read_network(path, column, deviation, quantity.weight)


def _locate(setting: str, name: str, folders: Sequence[Path]) -> Path:
    file = expanded(name)
    for folder in folders:
        if is_file(folder / file):
            return folder / file
    looked = " and ".join(str(folder) for folder in folders)
    hint = "" if len(folders) > 1 else "; set FEDEMU_DATA to the folder that holds it"
    raise ConfigurationError(f'{setting} = "{name}" is not there: looked in {looked}{hint}')
