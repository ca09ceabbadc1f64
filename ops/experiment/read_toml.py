"""Reads TOML files. What is wrong with one is told in one sentence, with its line."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from fedemu.protocol.errors import ConfigurationError

MOST_CHARACTERS = 10_000_000
"""A longer file is not read to its end: a device such as /dev/zero has none."""
_PLACE = re.compile(r" \((at .*)\)$")


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a TOML file. Raises ConfigurationError if it cannot be read or is not TOML."""
    try:
        # Editors on Windows may write a byte order mark, which is no part of TOML.
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MOST_CHARACTERS + 1)
        if len(text) > MOST_CHARACTERS:
            raise ConfigurationError(f"{path} is no experiment: it holds more than {MOST_CHARACTERS:,} characters")
        if not text and path.is_fifo():
            raise ConfigurationError(
                f"nothing comes from {path}, a pipe, which can be read only once; save the experiment as a file"
            )
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {_in_words(str(error))}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is no TOML file: it is not text in UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from None
    except RecursionError:
        raise ConfigurationError(f"{path} is no experiment: its lists or tables are nested too deep") from None
    except ValueError:
        raise ConfigurationError(f"{path} holds a number of too many digits; write a smaller one") from None


def _in_words(said: str) -> str:
    """What the parser says, in the words of someone who writes TOML."""
    place = f", {found[1]}" if (found := _PLACE.search(said)) else ""
    what = _PLACE.sub("", said)
    if what == "Cannot overwrite a value":
        what = "a key is set twice"
    elif found := re.fullmatch(r"Cannot declare \((.*?),?\) twice", what):
        what = f"the table [{found[1].replace(chr(39), '').replace(', ', '.')}] is there twice"
    elif what.startswith("Expected '='"):
        what = "a line must be a [table] or key = value"
    elif what == "Invalid statement":
        what = "this is no [table], no key = value and no comment"
    elif place == ", at end of document" and what not in ("Unclosed array", "Unclosed inline table"):
        what = "a value, a bracket or a quotation mark is missing"
    elif what == "Illegal character '\\n'":
        what = "a text must end on its line, with the quotation mark with which it begins"
    elif what == "Invalid value":
        what = (
            "this is no value; text needs quotation marks, a number begins with a digit, and truths are true and false"
        )
    return f"{what[:1].lower()}{what[1:]}{place}"
