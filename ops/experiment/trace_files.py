"""Reads recorded availability, network and compute profiles from CSV files, plain or gzip.

An availability trace has the columns ``device`` or ``device_id``, ``start`` or ``start_s``, and ``end`` or ``end_s``.
Times are in seconds, and an empty end means that the device stayed on-line. It may have the columns ``policy``,
``state`` and ``bootstrap``, by which rows are chosen.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedemu.protocol.errors import ConfigurationError

KILOBITS_PER_KILOBYTE = 8.0
LARGEST = 1e50
"""Numbers beyond it, or nearer to 0 than its inverse, would leave the range of float64 when they are multiplied."""
LATEST = 1e13
"""Seconds, some 300,000 years. In the repetitions of a trace that is much longer, short intervals would vanish."""


@dataclass(frozen=True)
class RecordedAvailability:
    """Recorded times on-line. ``devices`` holds for each device start, end, start, end, ... in seconds.

    The last end is missing if the device stayed on-line. ``last_event`` is the latest time in the file.
    """

    devices: tuple[tuple[float, ...], ...]
    last_event: float


@dataclass(frozen=True)
class Rows:
    """For each recorded device a value, the standard deviation of that value, and how often such a device occurs."""

    values: tuple[float, ...]
    deviations: tuple[float, ...]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class _Table:
    """The header of a file, and its rows, each with the number of the line in which it begins."""

    path: Path
    header: list[str]
    rows: list[tuple[int, list[str]]]

    def column(self, *names: str) -> int:
        """The place of the first of these columns that there is. Raises ConfigurationError if there is none."""
        for name in names:
            if name in self.header:
                return self.header.index(name)
        raise ConfigurationError(f"{self.path} has no column {' or '.join(names)}; it has {', '.join(self.header)}")

    def numbers(self, column: str) -> tuple[float, ...]:
        place = self.column(column)
        return tuple(_number(self.path, line, row[place]) for line, row in self.rows)

    def speeds(self, column: str) -> tuple[float, ...]:
        factor = KILOBITS_PER_KILOBYTE if column.endswith("kBps") else 1.0
        return tuple(factor * value for value in self.numbers(column))

    def weights(self, column: str) -> tuple[float, ...]:
        weights = self.numbers(column) if column else (1.0,) * len(self.rows)
        if sum(weights) <= 0:
            raise ConfigurationError(f"{self.path}: the column {column} gives no row a positive weight")
        return weights


def read_availability(
    path: Path, policy: str = "", state: str = "train", bootstrap: bool = False
) -> RecordedAvailability:
    """Read a trace. Devices are in the order in which the file first names them, even if none of their rows is chosen.

    ``policy`` must be given if the file has several. ``bootstrap`` also chooses rows that are marked as artificial.
    Raises ConfigurationError if the file cannot be read, or if no row is chosen.
    """
    table = _read(path)
    header = table.header
    device = table.column("device_id", "device")
    start = table.column("start_s", "start")
    end = table.column("end_s", "end")
    if "policy" in header:
        policies = list(dict.fromkeys(row[header.index("policy")] for _, row in table.rows))
        if policy and policy not in policies:
            raise ConfigurationError(f'{path} has no policy "{policy}"; it has {", ".join(policies)}')
        if not policy and len(policies) > 1:
            raise ConfigurationError(f"{path} has several policies; set policy to one of {', '.join(policies)}")
    spells: dict[str, list[tuple[float, float]]] = {}
    last_event = 0.0
    for line, row in table.rows:
        spell = spells.setdefault(row[device], [])
        begin = _time(path, line, row[start])
        finish = _time(path, line, row[end]) if row[end].strip() else math.inf
        if finish < begin:
            raise ConfigurationError(f"{path} line {line}: the interval ends at {finish:g}, before its start {begin:g}")
        if _differs(header, row, "policy", policy) or _differs(header, row, "state", state):
            continue
        if not bootstrap and "bootstrap" in header and row[header.index("bootstrap")].strip() not in ("", "0"):
            continue
        last_event = max(last_event, begin, finish if finish < math.inf else begin)
        spell.append((begin, finish))
    devices = tuple(_flat(spell) for spell in spells.values())
    if not any(devices):
        asked = {"policy": policy, "state": state, "bootstrap": "" if bootstrap else "0"}
        kept = " and ".join(f"{column} {wanted!r}" for column, wanted in asked.items() if wanted and column in header)
        raise ConfigurationError(f"{path} has no interval{kept and f' of {kept}'} in which a device is on-line")
    return RecordedAvailability(devices, last_event)


def _differs(header: list[str], row: list[str], column: str, wanted: str) -> bool:
    return bool(wanted) and column in header and row[header.index(column)] != wanted


def _flat(spells: list[tuple[float, float]]) -> tuple[float, ...]:
    """The spells as start, end, start, end, ... ascending.

    Overlaps are joined; a last spell without an end has no end.
    """
    joined: list[list[float]] = []
    for start, end in sorted(spells):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        elif start < end:
            joined.append([start, end])
    return tuple(time for spell in joined for time in spell if time < math.inf)


def read_network(path: Path, column: str, deviation: str = "", weight: str = "") -> Rows:
    """Read speeds in kbps. A column whose name ends in ``kBps`` is in 1,000 byte/s and is converted.

    ``deviation`` and ``weight`` name the columns of the standard deviations and of the weights; empty means none.
    Raises ConfigurationError if the file cannot be read, or a speed is not above 0.
    """
    table = _read(path)
    values = table.speeds(column)
    deviations = table.speeds(deviation) if deviation else (0.0,) * len(values)
    _require_positive(path, column, values)
    return Rows(values, deviations, table.weights(weight))


def read_compute(path: Path, column: str, median: float, weight: str = "") -> Rows:
    """Turn benchmark scores, of which higher ones are faster, into seconds per sample.

    The median score takes ``median`` seconds. With a column ``weight`` the median is that of the weighted population.
    Raises ConfigurationError if the file cannot be read, or a score is not above 0.
    """
    table = _read(path)
    scores = table.numbers(column)
    _require_positive(path, column, scores)
    weights = table.weights(weight)
    middle = _median(scores, weights)
    return Rows(tuple(median * middle / score for score in scores), (0.0,) * len(scores), weights)


def _median(values: Sequence[float], weights: Sequence[float]) -> float:
    """The weighted median: the lowest value up to which more than half of the weight lies.

    If exactly half of the weight lies up to a value, it is the mean of that value and the next one.
    """
    half = sum(weights) / 2
    below = 0.0
    pairs = sorted((value, weight) for value, weight in zip(values, weights, strict=True) if weight > 0)
    for place, (value, weight) in enumerate(pairs):
        below += weight
        if below == half:
            return (value + pairs[place + 1][0]) / 2
        if below > half:
            return value
    raise AssertionError("weights are positive")


def _require_positive(path: Path, column: str, values: Sequence[float]) -> None:
    if min(values) <= 0:
        raise ConfigurationError(f"{path}: the column {column} holds {min(values):g}, but all values must be above 0")


def _number(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigurationError(f"{path} line {line}: {text!r} is not a number") from None
    if not 0 <= value < math.inf:
        raise ConfigurationError(f"{path} line {line}: {text} must be finite and not negative")
    if value and not 1 / LARGEST <= value <= LARGEST:
        raise ConfigurationError(f"{path} line {line}: {text} must be 0 or from {1 / LARGEST:g} to {LARGEST:g}")
    return value


def _time(path: Path, line: int, text: str) -> float:
    value = _number(path, line, text)
    if value > LATEST:
        raise ConfigurationError(
            f"{path} line {line}: {text} is no time, which is in seconds and at most {LATEST:g}; write it in seconds, "
            "counted from the beginning of the trace"
        )
    return value


def _read(path: Path) -> _Table:
    """Read the table of a file. Raises ConfigurationError if it holds none."""
    try:
        table = [(line, row) for line, row in _lines(path) if row]
    except FileNotFoundError:
        raise ConfigurationError(f"there is no file {path}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ConfigurationError(f"{path} can't be read as CSV: {error}") from None
    if len(table) < 2:
        raise ConfigurationError(f"{path} holds no rows; a header and at least one row are needed")
    header = [name.strip() for name in table[0][1]]
    for line, row in table[1:]:
        if len(row) != len(header):
            raise ConfigurationError(f"{path} line {line} has {len(row)} values, but the header has {len(header)}")
    return _Table(path, header, table[1:])


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The rows, each with the number of the line in which it begins.

    A spreadsheet may write a byte order mark, which is no part of a name, and line breaks within a cell.
    """
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        text = io.StringIO(file.read().decode("utf-8-sig"), newline="")
    reader, line = csv.reader(text), 1
    for row in reader:
        yield line, row
        line = reader.line_num + 1
