"""Words for messages: what pydantic found wrong, what a value is, how a process ended or why none began, how many of a
thing there are, some of many names, and which counts of a repeated thing are told."""

from __future__ import annotations

import errno
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

WHOLE_NUMBER = "a whole number"
_NUMBER = "a number"
_TRUTH = "true or false"
_TEXT = "text"
_LIST = "a list"
TABLE = "a table"
KINDS = {
    "int_type": WHOLE_NUMBER,
    "int_parsing": WHOLE_NUMBER,
    "int_from_float": WHOLE_NUMBER,
    "int_parsing_size": "a whole number of fewer digits",
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "bool_type": _TRUTH,
    "bool_parsing": _TRUTH,
    "string_type": _TEXT,
    "string_unicode": "text in UTF-8",
    "bytes_type": "bytes",
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "iterable_type": _LIST,
    "dict_type": TABLE,
    "mapping_type": TABLE,
    "model_type": TABLE,
    "model_attributes_type": TABLE,
    "dataclass_type": TABLE,
    "union_tag_invalid": "a table with a kind",
    "union_tag_not_found": "a table with a kind",
    "none_required": "left out",
    "callable_type": "a function",
    "missing": "given",
    "missing_argument": "given",
    "extra_forbidden": "left out",
}
"""What a value must be, by the kind of pydantic's error."""


KILLED = "SIGKILL (the kernel does so if memory runs out)"


def ending(code: int) -> str:
    """How a process ended, to stand after its name. ``code`` is as in subprocess: negative for a signal."""
    if code >= 0:
        return f"ended with code {code}"
    return f"was ended by {signal_name(-code)}"


def signal_name(number: int) -> str:
    """The name of a signal that ended a process."""
    known = {sign.value: sign.name for sign in signal.Signals}
    return KILLED if number == signal.SIGKILL else known.get(number, f"signal {number}")


def refusal(error: OSError) -> str:
    """Why the system starts no further process, and what to do."""
    if error.errno == errno.EAGAIN:
        return "the limit of processes is reached; raise it (ulimit -u, or pids.max of the container)"
    if error.errno == errno.ENOMEM:
        return "no memory is left; free some"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "the limit of open files is reached; raise it (ulimit -n)"
    return error.strerror or str(error)


def demand(detail: Mapping[str, Any]) -> str:
    """What a value must be, such as ``a whole number`` or ``at least 1``, to stand after *must be*.

    ``detail`` is one of the errors of a pydantic ``ValidationError``.
    """
    kind, context = str(detail["type"]), detail.get("ctx", {})
    match kind:
        case "greater_than":
            return f"above {context['gt']:g}"
        case "greater_than_equal":
            return f"at least {context['ge']:g}"
        case "less_than":
            return f"below {context['lt']:g}"
        case "less_than_equal":
            return f"at most {context['le']:g}"
        case "multiple_of":
            return f"a multiple of {context['multiple_of']:g}"
        case "literal_error" | "enum":
            return f"one of {_choices(str(context['expected']))}"
        case "string_too_short":
            least = context["min_length"]
            return "a text that is not empty" if least == 1 else f"a text of at least {least} characters"
        case "string_too_long":
            return f"a text of at most {context['max_length']} characters"
        case "string_pattern_mismatch":
            return f"a text that fits the pattern {context['pattern']}"
        case "too_short":
            least = context["min_length"]
            return "a list that is not empty" if least == 1 else f"a list of at least {least} values"
        case "too_long":
            return f"a list of at most {context['max_length']} values"
        case _ if kind in KINDS:
            return KINDS[kind]
        case _:
            said = str(detail["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
            return said[:1].lower() + said[1:]


def _choices(expected: str) -> str:
    """``'a', 'b' or 'c'``, as pydantic writes it, as ``a, b, c``."""
    return expected.replace(" or ", ", ").replace("'", "")


def an_object(value: Any) -> str:
    """What a value is, by the name of its type: ``an int``, ``a Tensor``."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"


def no_utf8(remedy: str) -> str:
    """What is wrong with a text from outside whose bytes could not be decoded, and what to do, to follow the text."""
    if sys.getfilesystemencoding() == "utf-8":
        return f"is no UTF-8; {remedy}"
    return f"can't be read in this locale, which is not one of UTF-8; set LC_ALL=C.UTF-8, or {remedy}"


def counted(number: int, noun: str) -> str:
    """A number with its noun in the right form: ``1 round``, ``12 rounds``. The plural of ``noun`` ends in s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def some_of(names: Sequence[str], most: int = 3) -> str:
    """The first names with commas between them, and how many more there are. Empty if there are none."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def is_milestone(count: int) -> bool:
    """Whether a count is 1, 10, 100 and so on. What strangers can repeat without end is told at these counts only."""
    return str(count).strip("0") == "1"


def readable(text: str) -> str:
    """What a peer has written, for people: terminals would obey control characters. The lines stay."""
    return "".join(sign if sign.isprintable() or sign == "\n" else " " for sign in text)


def one_line(text: str) -> str:
    """What a peer has written, for people, as one line of their terminal or log."""
    return readable(text).replace("\n", " ")
