"""The JSON Schema of experiment files, by which editors complete keys, explain them and mark mistakes.

It is made of the tables themselves. It knows keys, types, ranges and kinds, and not what fits together.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from fedemu.ops.experiment.experiment import Experiment
from fedemu.ops.experiment.presets import part_names, part_table
from fedemu.ops.experiment.runtime import Runtime
from fedemu.ops.experiment.starter import KEYS, TABLES
from fedemu.ops.experiment.tables.section import FILLED

TITLE = "An experiment of fedemu"
DRAFT = "https://json-schema.org/draft/2020-12/schema"

_NAMES = {"algorithm.name": "name", "algorithm.loss": "loss"}


def schema() -> dict[str, Any]:
    """The schema, draft 2020-12, with descriptions and defaults."""
    found = _plain(Experiment.model_json_schema())
    of_runtime = _plain(Runtime.model_json_schema())
    del of_runtime["properties"]["track"]  # in a file it is a table of its own
    defined: dict[str, Any] = {**found["$defs"], **of_runtime.pop("$defs", {}), "Runtime": of_runtime}
    properties = {key: value for key, value in found["properties"].items() if key not in FILLED}
    properties["runtime"] = {"$ref": "#/$defs/Runtime"}
    properties["track"] = {"$ref": "#/$defs/Track"}
    _add_other_spellings(defined)
    whole = {
        "$schema": DRAFT,
        "title": TITLE,
        "description": "docs/configuration.md explains every key. A key that is left out has its default.",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "$defs": defined,
    }
    _describe(whole)
    used = _used(properties, defined)
    return whole | {"$defs": {name: defined[name] for name in sorted(used)}}


def _add_other_spellings(defined: dict[str, Any]) -> None:
    """What a file may have, and an experiment that was read has not."""
    fleet = defined["Fleet"]["properties"]
    fleet["participation"] = {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": 1,
        "description": "the share of devices whose replies a round takes, in place of per_round",
    }
    defined["Natural"].pop("required", None)  # without a column it is that of data.id_column
    for table, key in (("Tree", "edges"), ("Track", "to")):  # one value is a list of one
        several = defined[table]["properties"][key]
        default = {"default": several.pop("default")}
        one = {"type": "integer", "minimum": 0, "maximum": 256} if key == "edges" else dict(several["items"])
        defined[table]["properties"][key] = {"anyOf": [several, one], **default}
    for definition in defined.values():
        if "const" in definition.get("properties", {}).get("kind", {}):
            definition["required"] = sorted({"kind", *definition.get("required", [])})


def _describe(whole: dict[str, Any]) -> None:
    """Put a description to every table and to every key."""
    for key, setting in whole["properties"].items():
        said = TABLES.get(key) or KEYS.get(key)
        if said:
            setting["description"] = said.replace("\n", " ")
    for path, field in _NAMES.items():
        table, _, key = path.partition(".")
        tables = (part_table(part).get(table, {}) for part in part_names())
        known = sorted({one[field] for one in tables if field in one})
        whole["$defs"]["AlgorithmSpec"]["properties"][key]["examples"] = known
    sections = {section: name for name, section in _sections(whole)}
    for name, definition in whole["$defs"].items():
        for key, setting in definition.get("properties", {}).items():
            said = KEYS.get(f"{sections.get(name, '')}.{key}") or _sentences(name, key)
            if said and "description" not in setting:
                setting["description"] = said


def _sections(whole: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The definitions that are the table of a key of the experiment, as (definition, key)."""
    for key, setting in whole["properties"].items():
        for reference in _references(setting):
            yield key, reference


def _sentences(name: str, key: str) -> str:
    """The sentences about a key in the docstring of its table; else the beginning of the docstring."""
    model = next((one for one in _models(BaseModel) if one.__name__ == name), None)
    text = " ".join((inspect.getdoc(model) or "").split()) if model else ""
    sentences = re.split(r"(?<=[.)]) (?=[A-Z`(])", text)
    about = [sentence for sentence in sentences if f"``{key}" in sentence]
    return " ".join(about or sentences[:1]).replace("``", "")


def _models(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for model in root.__subclasses__():
        if model.__module__.startswith("fedemu.ops.experiment"):
            yield model
        yield from _models(model)


def _plain(value: Any) -> Any:
    """A schema of pydantic without titles, and with ``anyOf`` for the kinds of a table."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    plain: dict[str, Any] = {}
    for key, one in value.items():
        if key == "properties":
            plain[key] = {name: _plain(setting) for name, setting in one.items()}
        elif key == "description":
            plain[key] = one.replace("``", "")
        elif key == "default":
            plain[key] = one
        elif key not in ("title", "discriminator"):
            plain["anyOf" if key == "oneOf" else key] = _plain(one)
    return plain


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for one in value:
            yield from _references(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            if key == "$ref":
                yield one.rpartition("/")[2]
            else:
                yield from _references(one)


def _used(value: Any, defined: Mapping[str, Any]) -> set[str]:
    """The names of all definitions that a schema leads to."""
    used: set[str] = set()
    waiting = [*_references(value)]
    while waiting:
        name = waiting.pop()
        if name not in used:
            used.add(name)
            waiting += _references(defined[name])
    return used
