"""Lays settings over settings: a preset, a method, a file, the environment and the command line become one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedemu.ops.experiment.tables.learning import AlgorithmSpec, ModelSpec

_NAMES = {
    "model": ModelSpec.model_fields["name"].default,
    "algorithm": AlgorithmSpec.model_fields["name"].default,
}
"""What a table without a name means, by the full key of the table."""


def merge(below: Mapping[str, Any], above: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Lay the settings of ``above`` over those of ``below``, table by table.

    One setting on the command line has to be enough to choose another kind of table, another model or another method.
    So a table whose kind or name changes loses the settings that it had. Likewise ``per_round`` and ``participation``
    remove each other. An empty table takes away all settings of its table, so that the defaults hold. ``path`` is the
    full key of the two tables.
    """
    kept = dict(below)
    if "kind" in above and above["kind"] != below.get("kind"):
        kept = {}
    if "name" in above and path in _NAMES and above["name"] != below.get("name", _NAMES[path]):
        kept = {} if path == "model" else {key: value for key, value in kept.items() if key != "options"}
    if path == "fleet" and above.keys() & {"per_round", "participation"}:
        kept = {key: value for key, value in kept.items() if key not in {"per_round", "participation"}}
    for key, value in above.items():
        old = kept.get(key)
        inner = f"{path}.{key}" if path else key
        kept[key] = value
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value:
            kept[key] = merge(old, value, inner)
    return kept
