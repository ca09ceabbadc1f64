"""Settings over settings: how a preset, a method, a file, the environment and the command line become one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def merge(below: Mapping[str, Any], above: Mapping[str, Any], path: str = "") -> dict[str, Any]:
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
        kept[key] = merge(old, value, inner) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return kept
