"""A row: what is known of one finished round, as one line of ``metrics.jsonl``. It is written and read here only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedemu.coordinator.record.growing import GrowingLog
from fedemu.coordinator.record.json_lines import damaged, numbered_lines, place_of, plain
from fedemu.protocol.messages import OUTCOMES
from fedemu.protocol.wording import demand

Values = tuple[float | None, ...]
"""One number for each class or period; None where there is nothing to measure, such as a class without samples."""


@dataclass(frozen=True)
class Row:
    """One round in numbers. None means "not measured", and that is the only meaning of None.

    A value that is not finite counts as not measured, so a row in memory equals the same row read back from its file.
    The fields are the columns of ``metrics.jsonl``, in the order of the file. ``docs/run_directory.md`` explains them.
    Times are seconds, shares are shares of 1.
    """

    round: int
    task: int | None = None
    virtual_time: float | None = None
    wall_time: float | None = None
    test_samples: int | None = None
    accuracy: float | None = None
    loss: float | None = None
    perplexity: float | None = None
    class_accuracy: Values | None = None
    seen_accuracy: float | None = None
    seen_loss: float | None = None
    period_accuracy: Values | None = None
    period_loss: Values | None = None
    untrained_period_accuracy: Values | None = None
    validation_accuracy: float | None = None
    period_since: tuple[int, ...] | None = None
    consistency: float | None = None
    round_forgetting: float | None = None
    local_forgetting: float | None = None
    aggregation_forgetting: float | None = None
    local_alignment: float | None = None
    global_alignment: float | None = None
    joined: int | None = None
    online: int | None = None
    selected: int | None = None
    accepted: int | None = None
    dropped: int | None = None
    crashed: int | None = None
    late: int | None = None
    cancelled: int | None = None
    failed: int | None = None
    rejected: int | None = None
    attempts: int | None = None
    bytes_down: int | None = None
    bytes_up: int | None = None
    device_metrics: Mapping[str, float | None] = field(default_factory=dict)
    """What the program reported, by name. Empty if it reported nothing."""
    remarks: Mapping[str, Any] = field(default_factory=dict)
    """What the method says of the round, by name. Empty if it says nothing."""
    round_seconds: float | None = None
    server_seconds: float | None = None
    coordinator_seconds: float | None = None
    device_seconds: float | None = None
    wire_bytes_down: int | None = None
    wire_bytes_up: int | None = None

    def __post_init__(self) -> None:
        for column in COLUMNS:
            value = plain(getattr(self, column))
            object.__setattr__(self, column, tuple(value) if isinstance(value, list) else value)

    @classmethod
    def read(cls, line: Mapping[str, Any]) -> Row:
        """The row that a line of ``metrics.jsonl`` holds. An older version of fedemu may have written the line.

        A column that the line lacks is None. A column that this version does not know is ignored. Raises ValueError
        with one sentence if the line does not tell its round, or a column holds a value of another type.
        """
        try:
            return _adapter().validate_python({key: value for key, value in line.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            column = first["loc"][0] if first["loc"] else "the row"
            raise ValueError(f"{column} is {line.get(str(column))!r}, and must be {demand(first)}") from error

    def to_json(self) -> dict[str, Any]:
        """The columns in the order of the file, as JSON knows them."""
        return {column: getattr(self, column) for column in COLUMNS}

    def number(self, column: str) -> float | None:
        """The value of a column that holds one number, None if it was not measured. AttributeError for other names."""
        value: float | None = getattr(self, column)
        return value

    def about(self, topic: str, *needed: str) -> Mapping[str, Any]:
        """The remarks about a topic (replay, coordination, generator), by name.

        Empty if there are none, or if a name that is ``needed`` is missing: a method of one's own may say anything.
        """
        said = self.remarks.get(topic)
        return said if isinstance(said, Mapping) and all(name in said for name in needed) else {}

    @property
    def kept_objective(self) -> float | None:
        """The objective of the samples that devices keep after this round, by sample, from the remarks about replay.

        It is 1 if all gradients are at right angles, less if they cancel each other, and the number of samples if all
        have one direction. None if it was not measured, or if nothing is kept.
        """
        kept = self.about("replay", "objective", "samples")
        known = all(isinstance(kept.get(name), int | float) for name in ("objective", "samples"))
        return kept["objective"] / kept["samples"] if known and kept["samples"] else None

    @property
    def outcomes(self) -> dict[str, int]:
        """The number of selected devices by outcome, in the order of ``OUTCOMES``. 0 if it was not counted."""
        return {outcome: getattr(self, outcome) or 0 for outcome in OUTCOMES}


def updates_per_second(accepted: int, round_seconds: float) -> float | None:
    """How many device updates a run accepts per real second: all accepted replies over the real time of all rounds.

    Terminals and pages show this speed. The time between rounds does not count, such as the wait for the fleet. None
    before the first round is over.
    """
    return accepted / round_seconds if round_seconds > 0 else None


def read_rows(directory: Path) -> tuple[Row, ...]:
    """The rows of a run directory, empty before the first round. A line that does not tell its round is left out.

    Raises ConfigurationError for a line that is damaged.
    """
    return RowLog(directory).more()


class RowLog:
    """The rows of a run directory for one who follows the run: each is read once, unless the file began anew."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "metrics.jsonl"
        self._log = GrowingLog(self._path)
        self._lines = 0

    def more(self) -> tuple[Row, ...]:
        """The rows since the last call. Raises ConfigurationError for a line that is damaged."""
        text, anew = self._log.look()
        if anew:
            self._lines = 0
        rows = []
        for number, line in numbered_lines(self._path, text, self._lines):
            if line.get("round") is not None:
                try:
                    rows.append(Row.read(line))
                except ValueError as error:
                    raise damaged(place_of(self._path, number), str(error)) from error
        self._log.read(text)
        self._lines += len(text.splitlines())
        return tuple(rows)


COLUMNS = tuple(column.name for column in fields(Row))
"""The columns of ``metrics.jsonl``, in the order of the file."""


@cache
def _adapter() -> TypeAdapter[Row]:
    return TypeAdapter(Row)
