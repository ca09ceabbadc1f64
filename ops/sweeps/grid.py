"""Grids: the values of settings that a sweep tries, as they are written on the command line and in folder names."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from fedemu.ops.experiment.mistakes import plain_table
from fedemu.ops.experiment.sources import toml_of
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.protocol.errors import ConfigurationError

Choice = tuple[str, Any]
"""A key of a setting, such as ``local.lr``, and the value that one run has there."""

_PART = r"""([A-Za-z0-9_:-]+|"[^"]+"|'[^']+')"""
KEY = re.compile(rf"{_PART}(\.{_PART})*")
"""The key of a setting, as in ``local.lr`` or ``algorithm.terms."mine.py:held".width``."""
OF_MACHINES = ("runtime", "track")
"""The tables whose settings belong to a machine, and to no experiment."""
_PAIRS = {"[": "]", "{": "}", '"': '"', "'": "'"}
_LONGEST = 40
"""Letters of a value in the name of a folder."""


def parse_grid(options: Sequence[str]) -> dict[str, list[Any]]:
    """The values by key of options such as ``local.lr=0.01,0.1``. Commas in brackets, braces and quotes part nothing.

    Raises ConfigurationError for what is no such option, and for a key or a value that is there twice.
    """
    grid: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        key = key.strip()
        if not equals or not KEY.fullmatch(key):
            raise ConfigurationError(f'--grid "{option}" is no grid; write KEY=VALUE,VALUE as in local.lr=0.01,0.1')
        require_varied("--grid", key, text.strip(), grid)
        grid[key] = values_of(text, f"--grid {key}")
    return grid


def require_varied(option: str, key: str, text: str, earlier: Container[str]) -> None:
    """Raise ConfigurationError for a key that ``--grid`` and ``--search`` can't vary, or that is there twice.

    ``option`` is one of these two, ``text`` the values that it gives to the key, and ``earlier`` the keys before it.
    """
    if key == "seed":
        seeds = text.removesuffix(":log").replace("..", "-")
        raise ConfigurationError(f"{option} {key}={text} varies the seed; write --seeds {seeds}")
    if key.split(".")[0] in OF_MACHINES:
        raise ConfigurationError(f"{option} {key}={text} varies a setting of the machine, which changes no result")
    if key in earlier:
        raise ConfigurationError(f"{option} {key} is there twice; write all its values after one {option}")


def values_of(text: str, name: str) -> list[Any]:
    """The values that a text lists, as in ``0.01,0.1`` or ``[64],[64,64]``. ``name`` is said in errors."""
    parts = [part.strip() for part in _parted(text, name)]
    if "" in parts:
        raise ConfigurationError(f"{name}={text} lacks a value; write values with commas between them, as in 0.01,0.1")
    values = [plain_table({name: toml_of(part, name)})[name] for part in parts]
    told = [json.dumps(value, sort_keys=True) for value in values]
    if twice := next((part for part, said in zip(parts, told, strict=True) if told.count(said) > 1), None):
        raise ConfigurationError(f"{name}={text} names {twice} twice; name every value once")
    return values


def points(grid: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Choice, ...]]:
    """Every combination of the values of a grid. The last key changes fastest. A grid without keys has one."""
    for values in product(*grid.values()):
        yield tuple(zip(grid, values, strict=True))


def name_of(choices: Sequence[Choice]) -> str:
    """How a combination is called in the name of a folder: ``local.lr=0.01,local.epochs=5``."""
    return ",".join(f"{re.sub(r'[^A-Za-z0-9._-]+', '-', _unquoted(key))}={_slug(value)}" for key, value in choices)


def override_of(choice: Choice) -> str:
    """A choice in the form of ``--set``."""
    return f"{choice[0]}={toml_value(choice[1])}"


def _unquoted(key: str) -> str:
    return re.sub("[\"']", "", key)


def _slug(value: Any) -> str:
    """A value as a short word that can be part of a folder's name. Different values have different words."""
    plain = isinstance(value, list) and all(isinstance(one, int | float | str) for one in value)
    text = "-".join(map(_word, value)) if plain else _word(value)
    kept = re.sub(r"[^A-Za-z0-9._+-]+", "-", text).strip("-")
    if kept == text and 0 < len(text) <= _LONGEST:
        return text
    mark = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:6]
    return f"{kept[:_LONGEST]}-{mark}".strip("-")


def _word(value: Any) -> str:
    return value if isinstance(value, str) else toml_value(value).replace('"', "")


def _parted(text: str, name: str) -> Iterator[str]:
    """The parts of a text between its commas. Those inside brackets, braces and quotes part nothing."""
    closing: list[str] = []
    start, place = 0, 0
    while place < len(text):
        letter = text[place]
        quoted = bool(closing) and closing[-1] in "\"'"
        if letter == "\\" and quoted and closing[-1] == '"':
            place += 1
        elif closing and letter == closing[-1]:
            closing.pop()
        elif letter in _PAIRS and not quoted:
            closing.append(_PAIRS[letter])
        elif letter == "," and not closing:
            yield text[start:place]
            start = place + 1
        place += 1
    if closing:
        raise ConfigurationError(f"{name}={text} has no {closing[-1]} at its end; check its brackets and quotes")
    yield text[start:]
