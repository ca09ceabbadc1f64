"""Tells an error of a user's own code with his own file and line. No other place does this.

A frame is the user's if its file is part of neither fedemu nor an installed package nor Python itself.
"""

from __future__ import annotations

import builtins
import functools
import os
import re
import textwrap
import traceback
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fedemu.protocol.errors import FedemuError

LONGEST = 400
"""At most this number of characters of an error's own message is quoted."""
_LONGEST_LINE = 120
_MOST_FRAMES = 6
_INDENT = "    "
_ROOT = Path(__file__).resolve().parents[2]
_FLOORS = ("protocol", "algorithms", "device", "coordinator", "ops")
_OURS = (*_FLOORS, "tests", "__init__.py", "__main__.py")
"""What of the package's folder is fedemu's own. A clone may also hold files of its user."""
_OF_PYTHON = Path(os.__file__).resolve().parent


class Elsewhere(Exception):
    """An error of another process. Its text is the whole traceback from there."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"


def account(error: BaseException) -> str:
    """Tell an error in one sentence without a full stop: its type, its message, and the user's last file and line.

    The user's own frames follow in indented lines, if there are any, each with its source line. So the account must
    stand at the end of a text. A FedemuError is told by its text alone, which is a sentence already.
    """
    if isinstance(error, FedemuError):
        return str(error)
    frames = own_frames(error)
    if not frames and _ours(error):
        return str(error)
    said = f"{type(error).__name__}: {message}" if (message := _message(error)) else type(error).__name__
    if not frames:
        return said
    last = frames[-1]
    lines = [f"{said}, {place(last)}"]
    if len(frames) > _MOST_FRAMES:
        lines.append(f"{_INDENT}... {len(frames) - _MOST_FRAMES} more of your frames before these")
    return "\n".join([*lines, *(f"{_INDENT}{_shown(frame)}" for frame in frames[-_MOST_FRAMES:])])


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's own code, the outermost first. A SyntaxError adds the place that it tells of."""
    if isinstance(error.__cause__, StopIteration):
        # Python lets no StopIteration leave a generator: it raises a RuntimeError at the caller in its place.
        error = error.__cause__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    if isinstance(error, SyntaxError) and error.filename and error.lineno and is_own(error.filename):
        line = error.text.strip() if error.text else None
        frames.append(traceback.FrameSummary(error.filename, error.lineno, "<module>", line=line))
    return frames


def whole(error: BaseException) -> str:
    """The whole traceback of an error, with its causes."""
    return "".join(traceback.format_exception(error)).rstrip()


def cause_of(error: BaseException) -> BaseException | None:
    """The first error in the chain of causes that is none of fedemu's own. None if there is none."""
    seen: BaseException | None = error
    while isinstance(seen, FedemuError):
        seen = seen.__cause__
    return seen


class Told(NamedTuple):
    """An error on its way to another process: its sentence, and its cause by type, message and whole traceback.

    The three in the middle are empty if the cause is not of somebody else's code. The last is that of a FedemuError.
    """

    sentence: str
    kind: str = ""
    message: str = ""
    traceback: str = ""
    exit_code: int = 0


def told(error: BaseException, sentence: str = "") -> Told:
    """What another process has to know of an error, whose own text is the sentence unless one is given."""
    cause, sentence = cause_of(error), sentence or str(error)
    code = error.exit_code if isinstance(error, FedemuError) else 0
    if cause is None:
        return Told(sentence, exit_code=code)
    origin = next((one for one in (cause, cause.__cause__) if isinstance(one, Elsewhere)), None)
    return Told(sentence, type(cause).__name__, str(cause), whole(cause) if origin is None else origin.args[0], code)


def retold(found: Told, kind: type[FedemuError]) -> FedemuError:
    """An error of another process, as ``kind``, with its cause. Raise it."""
    error = kind(found.sentence)
    error.__cause__ = _rebuilt(found) if found.traceback else None
    return error


def _rebuilt(found: Told) -> BaseException:
    """The cause of an error of another process. It has its type if Python itself has this type, and its traceback."""
    kind = getattr(builtins, found.kind, None)
    if isinstance(kind, type) and issubclass(kind, Exception | SystemExit) and not issubclass(kind, UnicodeError):
        error: BaseException = kind(found.message)
        error.__cause__ = Elsewhere(found.traceback)
        return error
    return Elsewhere(found.traceback)


def _message(error: BaseException) -> str:
    """The message of an error on one line. Libraries add advice to many of their errors, which is left out."""
    text = error.msg if isinstance(error, SyntaxError) and error.filename else str(error)
    text = " ".join(text.split())
    innermost = next(reversed(traceback.extract_tb(error.__traceback__)), None)
    if innermost is None or not _raised_by(innermost):
        text = re.split(r"(?<=\D[.?!])\s+(?=[A-Z])", text)[0]
    return textwrap.shorten(text.rstrip("."), LONGEST, placeholder=" ...")


def _raised_by(frame: traceback.FrameSummary) -> bool:
    """Whether the user's own statement raised the error, and no library that it called."""
    return is_own(frame.filename) and (frame.line or "").startswith(("raise", "assert"))


def _ours(error: BaseException) -> bool:
    """Whether fedemu itself raised the error, whose text then is a sentence of fedemu's."""
    innermost = next(reversed(traceback.extract_tb(error.__traceback__)), None)
    return innermost is not None and (innermost.line or "").startswith("raise ") and _among(innermost.filename, _FLOORS)


def _shown(frame: traceback.FrameSummary) -> str:
    """A frame on one line: its place, its function and its statement."""
    name = "" if frame.name == "<module>" else f" in {frame.name}"
    line = textwrap.shorten(frame.line or "", _LONGEST_LINE, placeholder=" ...")
    return f"{place(frame)}{name}: {line}" if line else f"{place(frame)}{name}"


def place(frame: traceback.FrameSummary) -> str:
    """File and line. A file below the working folder is named from there."""
    file = frame.filename
    here = os.getcwd()
    return f"{os.path.relpath(file, here) if file.startswith(here + os.sep) else file}:{frame.lineno}"


@functools.lru_cache(maxsize=1024)
def is_own(file: str) -> bool:
    """Whether a file is the user's: part of neither fedemu nor an installed package nor Python itself.

    Compiled libraries name files that are not there, such as ``numpy/random/_generator.pyx``.
    """
    if not (os.path.isabs(file) or os.path.exists(file)):
        return False
    path = Path(file).resolve()
    if {"site-packages", "dist-packages"} & {*path.parts}:
        return False
    if any(path.relative_to(folder).parts[0] in _installed(folder) for folder in path.parents):
        return False
    return not _among(file, _OURS) and not path.is_relative_to(_OF_PYTHON)


@functools.lru_cache(maxsize=1024)
def _installed(folder: Path) -> frozenset[str]:
    """What pip has installed into any other folder, as ``pip install --target`` does: names of files and folders."""
    names: set[str] = set()
    with suppress(OSError):
        for record in folder.glob("*.dist-info/RECORD"):
            lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
            names.update(re.split("[/,]", line, maxsplit=1)[0] for line in lines)
    return frozenset(names)


def _among(file: str, parts: tuple[str, ...]) -> bool:
    """Whether a file belongs to these parts of the package's folder."""
    path = Path(file).resolve()
    return path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in parts
