"""The runs of a folder in short: how far each is, and how it ended. Nothing here fails on a damaged run."""

from __future__ import annotations

import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemu.coordinator.record.holder import holder_of
from fedemu.coordinator.record.json_lines import object_in
from fedemu.coordinator.record.outcome import outcome_of, planned_rounds
from fedemu.protocol.host.paths import exists, is_file, is_folder

MARKS = ("config.toml", "metrics.jsonl", "summary.json")
"""A folder with one of these files is a run directory."""
DEEPEST = 6
"""Folders below the one that is listed, in which runs are looked for."""
_TAIL = 2**16
"""Bytes at the end of the rows that are read first. More are read until the last row is whole."""
_OF_CONFIG = re.compile(r'^(name|seed) = "?([^"\n]*)"?', re.MULTILINE)
_METHOD = re.compile(r'^\[algorithm\]\nname = "([^"\n]*)"\nloss = "([^"\n]*)"', re.MULTILINE)
_TERMS = re.compile(r"^terms = (?!\{\}).*", re.MULTILINE)
_REPLAY = re.compile(r'^\[replay\]\nstrategy = "([^"\n]*)"', re.MULTILINE)


@dataclass(frozen=True)
class Listed:
    """One run. ``accuracy`` is a share of 1, ``seconds`` is real time, ``size`` is in bytes. None is not known.

    ``state`` is ``running``, an outcome as ``outcome_of`` tells it (completed, diverged, quorum, interrupted, failed),
    ``unfinished`` if the run has begun and its coordinator is gone without a summary, ``not begun``, or ``damaged``.
    """

    directory: Path
    name: str | None
    method: str | None
    seed: int | None
    state: str
    rounds: int | None
    of_rounds: int | None
    accuracy: float | None
    seconds: float | None
    ended: str | None
    digest: str | None
    size: int

    def table(self) -> dict[str, Any]:
        """The run in the form of JSON."""
        return {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}


def find(folder: Path) -> Iterator[Path]:
    """The run directories in a folder, or the folder itself if it is one, in counting order.

    Folders that cannot be read are left out, and links are not followed.
    """
    yield from _find(folder, DEEPEST)


def listed(directory: Path) -> Listed:
    """What is known of one run, from the first lines of its settings, its summary, and the end of its rows."""
    config = _text(directory / "config.toml") or ""
    known = dict(_OF_CONFIG.findall(config.partition("\n[")[0]))
    method, replay = _METHOD.search(config), _REPLAY.search(config)
    summary, damaged = _summary(directory)
    row, broken = _last_row(directory)
    finished = _whole(summary.get("rounds"))
    rounds = max((one for one in (finished, _whole(row.get("round"))) if one is not None), default=None)
    of_rounds = planned_rounds(config)
    state = _state(directory, summary, rounds, of_rounds)
    if state != "running" and (damaged or broken or of_rounds is None):
        state = "damaged"
    stale = finished != rounds
    return Listed(
        directory=directory,
        name=known.get("name"),
        method=_named(method[1], method[2], _terms(config), replay[1] if replay else "none") if method else None,
        seed=_whole(known.get("seed")),
        state=state,
        rounds=rounds,
        of_rounds=of_rounds,
        accuracy=_number(row.get("accuracy") if stale else summary.get("final_accuracy")),
        seconds=_number(row.get("wall_time") if stale else summary.get("wall_time")),
        ended=None if stale or not isinstance(summary.get("ended"), str) else summary["ended"],
        digest=None if stale or not isinstance(summary.get("model_digest"), str) else summary["model_digest"],
        size=_size(directory),
    )


def _terms(config: str) -> list[str]:
    """The names of the local terms."""
    line = _TERMS.search(config)
    try:
        return list(tomllib.loads(line[0])["terms"]) if line else []
    except (ValueError, TypeError):
        return []


def _named(method: str, loss: str, terms: list[str], replay: str) -> str:
    named = " + ".join([method, *([] if loss == "cross_entropy" else [loss]), *terms])
    return named if replay == "none" else f"{named}, replay {replay}"


def _state(directory: Path, summary: dict[str, Any], rounds: int | None, of_rounds: int | None) -> str:
    if holder_of(directory / ".lock") is not None:
        return "running"
    if outcome := outcome_of(summary, rounds or 0, of_rounds):
        return outcome
    begun = rounds is not None or is_folder(directory / "checkpoint")
    return "unfinished" if begun else "not begun"


def _find(folder: Path, left: int) -> Iterator[Path]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    if any(entry.name in MARKS for entry in entries):
        yield folder
        return
    below = [entry.name for entry in entries if not entry.name.startswith(".") and _is_folder(entry)]
    if left:
        for name in sorted(below, key=counting_order):
            yield from _find(folder / name, left - 1)


def counting_order(name: str) -> tuple[str, int, str]:
    """A sort key that puts seed-2 before seed-10."""
    stem = name.rstrip("0123456789")
    number = name[len(stem) :]
    return stem, int(number) if number else -1, name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _summary(directory: Path) -> tuple[dict[str, Any], bool]:
    """The summary, empty if there is none, and whether it is damaged."""
    path = directory / "summary.json"
    text = _text(path)
    if text is None:
        return {}, exists(path)
    found = object_in(text)
    return found or {}, found is None


def _last_row(directory: Path) -> tuple[dict[str, Any], bool]:
    """The last whole row, with the last accuracy that was measured near the end; and whether it is damaged."""
    try:
        text = _end(directory / "metrics.jsonl")
    except FileNotFoundError:
        return {}, False
    except OSError:
        return {}, True
    lines = text.splitlines()
    if not lines:
        return {}, False
    found = object_in(lines[-1])
    row = found or {}
    for line in reversed(lines):
        if row.get("accuracy") is not None:
            break
        row["accuracy"] = (object_in(line) or {}).get("accuracy")
    return row, found is None


def _end(path: Path) -> bytes:
    """The last whole lines of a file."""
    if _is_special(path):
        raise OSError(f"{path} is no file")
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        length = _TAIL
        while True:
            file.seek(max(0, size - length))
            text, newline, _ = file.read(min(size, length)).rpartition(b"\n")
            if length >= size:
                return text + newline
            if b"\n" in text:  # the first line may lack its beginning
                return text.partition(b"\n")[2] + newline
            length *= 2


def _is_special(path: Path) -> bool:
    """Whether there is something else than a file, such as a pipe, at which a reader would wait."""
    return exists(path) and not is_file(path)


def _text(path: Path) -> str | None:
    try:
        return None if _is_special(path) else path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _whole(value: object) -> int | None:
    try:
        return int(value) if isinstance(value, int | str) and not isinstance(value, bool) else None
    except ValueError:
        return None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def _size(folder: Path | str) -> int:
    """The bytes of all files in a folder. What vanishes meanwhile does not count."""
    total, waiting = 0, [os.fspath(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if _is_folder(entry):
                        waiting.append(entry.path)
                    else:
                        with suppress(OSError):
                            total += entry.stat(follow_symlinks=False).st_size
        except OSError:
            continue
    return total
