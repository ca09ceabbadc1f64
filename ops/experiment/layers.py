"""Lays settings over settings: a preset, a method, a file, the environment and the command line become one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fedemu.ops.experiment.experiment import Experiment
from fedemu.ops.experiment.mistakes import setting_paths
from fedemu.ops.experiment.tables.learning import AlgorithmSpec, ModelSpec

TAGS: Final[Mapping[str, str]] = {
    **{path.removesuffix(".kind"): "kind" for path in setting_paths(Experiment) if path.endswith(".kind")},
    "model": "name",
    "algorithm": "name",
}
"""The key of a table that says which other keys it may have, by the full key of the table.

Options of a model, of a method, of a term or of a partition are no such tables, whatever their names are.
"""

_DEFAULTS = {"model": ModelSpec.model_fields["name"].default, "algorithm": AlgorithmSpec.model_fields["name"].default}
"""What a table without a name means, by the full key of the table."""


def merge(below: Mapping[str, Any], above: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Lay the settings of ``above`` over those of ``below``, table by table.

    One setting on the command line has to be enough to choose another kind of table, another model or another method.
    So a table of ``TAGS`` whose kind or name changes loses the settings that it had; a method loses only its options.
    Likewise ``per_round`` and ``participation`` remove each other. An empty table takes away all settings of its table,
    so that the defaults hold. ``path`` is the full key of the two tables.
    """
    kept = dict(below)
    tag = TAGS.get(path)
    if tag is not None and tag in above and above[tag] != below.get(tag, _DEFAULTS.get(path)):
        kept = {key: value for key, value in kept.items() if key != "options"} if path == "algorithm" else {}
    if path == "fleet" and above.keys() & {"per_round", "participation"}:
        kept = {key: value for key, value in kept.items() if key not in {"per_round", "participation"}}
    for key, value in above.items():
        old = kept.get(key)
        # In [methods.NAME] a preset has settings as at the top of a file.
        inner = "" if path == "methods" else f"{path}.{key}" if path else key
        kept[key] = value
        if isinstance(old, Mapping) and isinstance(value, Mapping) and value:
            kept[key] = merge(old, value, inner)
    return kept
