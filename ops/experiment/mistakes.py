"""Turns a mistake in a configuration into one sentence: the full key, the value, its range, the nearest right key."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fedemu.ops.experiment.near import did_you_mean, near
from fedemu.ops.experiment.tables.section import FILLED
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import KINDS, TABLE, an_object, demand, no_utf8


def plain_table(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Copy a table deeply. ``path`` is its full key.

    Raises ConfigurationError if it holds anything but texts in UTF-8, bools, integers, finite floats, lists and tables.
    """
    plain = {}
    for name, value in table.items():
        key = _text(str(name), f"the key {str(name)!a}")
        plain[key] = _plain(value, f"{path}.{key}" if path else key)
    return plain


def _plain(value: Any, path: str) -> Any:
    match value:
        case Mapping():
            return plain_table(value, path)
        case list() | tuple():
            return [_plain(item, f"{path}[{place}]") for place, item in enumerate(value)]
        case float() if not math.isfinite(value):
            instead = "write a number" if math.isnan(value) else "write a large number instead"
            raise ConfigurationError(f"{path} = {value} must be finite; {instead}")
        case str():
            return _text(value, f"{path} = {value!a}")
        case bool() | int() | float():
            return value
        case _:
            raise ConfigurationError(f"{path} = {value} is {an_object(value)}, which no setting takes")


def _text(text: str, said: str) -> str:
    """The text. Raises ConfigurationError if it holds bytes of the command line that could not be decoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{said} {no_utf8('choose another')}") from None
    return text


def refuse(
    error: ValidationError, table: Mapping[str, Any], root: type[BaseModel], prefix: str = ""
) -> ConfigurationError:
    """Make the error to raise. It names the first mistake, and says how many more there are.

    ``table`` is what was checked against the model ``root``, and ``prefix`` is its full key.
    """
    details = error.errors(include_url=False)
    # An unknown key is named first, because the other mistakes often follow from it.
    details.sort(key=lambda detail: detail["type"] != "extra_forbidden")
    # A list with a wrong item is also told to be too short, because the item does not count.
    details = [detail for detail in details if detail["type"] != "too_short" or not detail["input"]] or details
    text = _sentence(details[0], table, root, prefix)
    if len(details) > 1:
        text += f" (and {len(details) - 1} more)"
    return ConfigurationError(text)


def _sentence(detail: ErrorDetails, table: Mapping[str, Any], root: type[BaseModel], prefix: str) -> str:
    keys = _keys(detail["loc"], table)
    path = _path([prefix, *keys] if prefix else keys)
    holder, field = _walk(root, detail["loc"])
    given = detail["input"]
    said = f"{path} = {shown(given)}"
    context = detail.get("ctx", {})
    match detail["type"]:
        case "extra_forbidden":
            return unknown_key(path, holder, root, prefix)
        case "missing":
            return f"{path} is missing; the table it belongs to needs it"
        case "value_error":
            wrong = str(context["error"])
            # A distribution may be that of several keys, so it cannot name its own.
            return wrong if path in wrong else f"{path}: {wrong}"
        case "union_tag_invalid" | "union_tag_not_found" if isinstance(given, Mapping):
            kind, kinds = given.get("kind"), list(_tags(field))
            if kind is None:
                return f"{path}.kind is missing; it must be one of {', '.join(kinds)}"
            words = f"it must be one of {', '.join(kinds)}{did_you_mean(str(kind), kinds, cutoff=0.6)}"
            return f"{path}.kind = {shown(kind)} is unknown; {words}"
        case "literal_error":
            choices = [str(choice) for choice in _choices(field)]
            one = f"it must be {choices[0]}" if len(choices) == 1 else f"it must be one of {', '.join(choices)}"
            later = " in this version" if len(choices) == 1 else ""
            return f"{said} is unknown; {one}{later}{did_you_mean(str(given), choices, cutoff=0.6)}"
        case kind if kind.startswith(("greater_than", "less_than")):
            return f"{said} must be {_range(field, given) or demand(detail)}"
        case "list_type" | "tuple_type":
            # For a list the range is left out: it is that of its items.
            return f"{said} must be a list{_as_list(given, field)}"
        case "string_too_short":
            return f"{said} must not be empty"
        case kind if KINDS.get(kind, "").startswith(TABLE):
            return f"{said} must be {TABLE}{_as_table(path, given, field)}"
        case "too_short":
            return f"{said} must be {demand(detail)}{_of_choices(field)}"
        case "string_pattern_mismatch":
            return f"{said} must be made of {_NAME_LETTERS}"
        case _:
            return f"{said} must be {demand(detail)}{_with_range(field)}"


def _as_list(given: Any, field: FieldInfo | None) -> str:
    """How to write a single choice as a list of choices."""
    choices = _choices(field)
    return f", as in {shown([given])}{_of_choices(field)}" if given in choices else _of_choices(field)


def _of_choices(field: FieldInfo | None) -> str:
    """What the items of a list may be. Empty if the field does not list them."""
    choices = _choices(field)
    return f"; its values are any of {', '.join(map(str, choices))}" if choices else ""


def _as_table(path: str, given: Any, field: FieldInfo | None) -> str:
    """How to write one word where a table is needed: as the key of the table that chooses its kind."""
    kinds = [str(kind) for model in _models(field) for kind in _choices(model.model_fields.get("kind"))]
    if kinds:
        return (
            f"; write {path}.kind = {shown(given)}" if given in kinds else f" whose kind is one of {', '.join(kinds)}"
        )
    named = any("name" in model.model_fields for model in _models(field))
    return f"; write {path}.name = {shown(given)}" if named and isinstance(given, str) else ""


_NAME_LETTERS = (
    "letters from a to z, digits, dots, dashes and underscores, and begin with a letter or digit, 100 at most"
)
_NO_LIMIT = 2**31 - 1
"""An upper bound that is only named to who goes beyond it."""
_SYNONYMS = {
    "learning_rate": "lr",
    "batch": "batch_size",
    "clients": "devices",
    "num_clients": "devices",
    "clients_per_round": "per_round",
    "num_rounds": "rounds",
    "local_epochs": "epochs",
    "method": "algorithm.name",
    "network": "model.name",
}
"""What other systems call a setting. A name with a dot is a full key."""


def unknown_key(path: str, holder: type[BaseModel], root: type[BaseModel], prefix: str = "") -> str:
    """Say that a key does not exist, and name the nearest one: in the same table, or the same word in another table."""
    *parents, key = path.split(".")
    known = [*holder.model_fields, *(["participation"] if "per_round" in holder.model_fields else [])]
    known = [name for name in known if name not in FILLED]
    if _SYNONYMS.get(key) in known:
        return f"{path} is no setting; did you mean {'.'.join([*parents, _SYNONYMS[key]])}?"
    everywhere = [f"{prefix}.{name}" if prefix else name for name in _all_paths(root)]
    called = _SYNONYMS.get(key)
    if meant := [name for name in everywhere if called is not None and f".{name}".endswith(f".{called}")]:
        return f"{path} is no setting; did you mean {meant[0]}?"
    if path in everywhere:
        others = [name for name in known if name != "kind"]
        has = f"has {', '.join(others)}" if others else "has no settings"
        return f'{path} is no setting of every kind; {".".join(parents)}.kind = "{_kind(holder)}" {has}'
    if found := [name for name in everywhere if "." in name and name.replace(".", "_") == path]:
        keyword = found[0].replace(".", "__")
        return f"{path} is no setting; did you mean {found[0]}, which is {keyword} as a keyword of Python?"
    # The same word in another table is meant rather than a word of this table that only looks like it. But many tables
    # have a kind or a name.
    same = dict.fromkeys(name for name in everywhere if name.rsplit(".", 1)[-1].lower() == key.lower())
    within = [name for name in same if name.startswith(".".join([*parents, ""]))]
    elsewhere = [*same] if len(same) < 3 else []
    if beside := within or elsewhere or [".".join([*parents, name]) for name in near(key, known)]:
        return f"{path} is no setting; did you mean {beside[0]}?"
    if "options" in known:
        return f"{path} is no setting; did you mean {'.'.join([*parents, 'options', key])}?"
    if found := near(path, [name for name in everywhere if name != ".".join(parents)], cutoff=0.8):
        return f"{path} is no setting; did you mean {found[0]}?"
    where = f"[{'.'.join(parents)}]" if parents else "an experiment"
    return f"{path} is no setting; {where} has {', '.join(known)}"


def _keys(loc: Sequence[int | str], table: Any) -> list[str | int]:
    """The keys of a location, as the user wrote them. Pydantic also names the tags of unions; they are left out."""
    keys: list[str | int] = []
    here = table
    entered = False  # whether the key before led into a table, after which its tag may come
    for place, part in enumerate(loc):
        is_tag = entered and isinstance(here, Mapping) and part == here.get("kind")
        entered = False
        if is_tag:
            continue
        inside = part in here if isinstance(here, Mapping) else isinstance(here, list) and isinstance(part, int)
        if inside:
            here = here[part]
            keys.append(part)
            entered = True
        elif isinstance(here, Mapping) and place == len(loc) - 1:
            keys.append(part)
    return keys


def _path(keys: Sequence[str | int]) -> str:
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def _walk(root: type[BaseModel], loc: Sequence[int | str]) -> tuple[type[BaseModel], FieldInfo | None]:
    """The model that holds the last key of a location, and the field of that key. None if there is no such field."""
    holder, field = root, None
    for place, part in enumerate(loc):
        models = list(_models(field)) if field is not None else [root]
        tagged = [model for model in models if part == _kind(model)] if len(models) > 1 else []
        if tagged:
            holder = tagged[0]
            field = FieldInfo(annotation=holder)
            continue
        if len(models) == 1 and isinstance(part, str):
            holder = models[0]
            field = holder.model_fields.get(part)
            if field is None:
                break
        elif place == len(loc) - 1:
            break
    return holder, field


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every model in an annotation, also inside unions and ``Annotated``."""
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for argument in get_args(annotation):
        if not isinstance(argument, str):
            yield from _models(argument)


def _kind(model: type[BaseModel]) -> str | None:
    field = model.model_fields.get("kind")
    return None if field is None else str(field.default)


def _tags(field: FieldInfo | None) -> Iterator[str]:
    return (kind for model in _models(field) if (kind := _kind(model)) is not None)


def _choices(annotation: Any) -> list[Any]:
    """The values of the Literal in an annotation."""
    if isinstance(annotation, FieldInfo):
        annotation = annotation.annotation
    arguments = get_args(annotation)
    if arguments and all(isinstance(argument, str) for argument in arguments):
        return list(arguments)
    return [choice for argument in arguments if not isinstance(argument, str) for choice in _choices(argument)]


def _range(field: Any, given: Any = None) -> str:
    """The range of a field, in words. Empty if it has no bounds. A very high bound counts if ``given`` is above it."""
    low = high = ""
    least: float | None = None
    beyond = given if isinstance(given, int | float) else 0
    for mark in _marks(field):
        match mark:
            case annotated_types.Gt(gt=bound):
                low = f"above {bound}"
            case annotated_types.Ge(ge=bound):
                low, least = f"at least {bound}", bound  # type: ignore[assignment]
            case annotated_types.Lt(lt=bound):
                high = f"below {bound}"
            case annotated_types.Le(le=bound) if bound != _NO_LIMIT or beyond > bound:
                if least is not None:
                    return f"from {least} to {bound}"
                high = f"at most {bound}"
    return " and ".join(words for words in (low, high) if words)


def _marks(annotation: Any) -> Iterator[Any]:
    if isinstance(annotation, FieldInfo):
        yield from annotation.metadata
        annotation = annotation.annotation
    for mark in getattr(annotation, "__metadata__", ()):
        yield from mark.metadata if isinstance(mark, FieldInfo) else [mark]
    for argument in get_args(annotation):
        if getattr(argument, "__metadata__", None):
            yield from _marks(argument)


def _with_range(field: FieldInfo | None) -> str:
    words = _range(field)
    return f" {'of ' if words.startswith('at ') else ''}{words}" if words else ""


def shown(value: Any) -> str:
    """A value as a user would write it, in at most 80 characters."""
    try:
        text = toml_value(value)
    except TypeError:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _all_paths(root: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in root.model_fields.items():
        if name in FILLED:
            continue
        path = f"{prefix}.{name}" if prefix else name
        yield path
        for model in _models(field):
            yield from _all_paths(model, path)


def setting_paths(root: type[BaseModel]) -> list[str]:
    """The full keys of all settings of a model, each once."""
    return list(dict.fromkeys(_all_paths(root)))
