"""The settings in which experiments differ, and how their names are written in a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedemu.ops.experiment.layers import TAGS
from fedemu.ops.results.words import Keys, Table, at


def differing(tables: Sequence[Table], path: Keys = ()) -> set[Keys]:
    """The settings that tell ``tables`` apart.

    Tables of different kinds (of a partition, a model or a method) have different settings. So their settings are
    compared only among tables of the same kind. ``path`` is the key of the tables.
    """
    tag = TAGS.get(".".join(path), "")
    kinds = [str(table.get(tag)) for table in tables]
    found = {(*path, tag)} if len(set(kinds)) > 1 else set()
    for kind in set(kinds):
        alike = [table for table, other in zip(tables, kinds, strict=True) if other == kind]
        for key in {key for table in alike for key in table} - {tag}:
            values = [table.get(key) for table in alike]
            if any(isinstance(value, Mapping) for value in values):
                found |= differing([value if isinstance(value, Mapping) else {} for value in values], (*path, key))
            elif any(value != values[0] for value in values):
                found.add((*path, key))
    return found


def usual(tables: Sequence[Table], path: Keys) -> Any:
    """The value of a setting in at least two thirds of the tables. None if there is none, or a table lacks the setting.

    A table that lacks the setting has to get another label than those that have the usual value.
    """
    return most_common([at(table, path) for table in tables])


def most_common(values: Sequence[Any]) -> Any:
    """The value that at least two thirds of ``values`` have. None if there is none, or if one of ``values`` is None."""
    most = max(values, key=values.count)
    return most if None not in values and 3 * values.count(most) >= 2 * len(values) else None


def short_name(path: Keys) -> str:
    """The shortest name of a setting: ``lr`` for local.lr, ``partition`` for data.partition.kind."""
    return path[-2] if TAGS.get(".".join(path[:-1])) == path[-1] else path[-1]
