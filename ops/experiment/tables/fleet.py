"""The tables that describe the devices: fleet, availability, profile, faults, and the content of trace files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Discriminator, Field, Tag, model_validator

from fedemu.coordinator.settings import ceil_share
from fedemu.ops.experiment.tables.section import AUTO, Count, NotNegative, Positive, Rate, Section, Text

_LARGEST = 1e100
"""No number of float64 that follows from numbers up to this one is infinite."""
Spell = Annotated[float, Field(ge=0.1, le=_LARGEST)]
"""The length of a spell in seconds. Much shorter ones would make more intervals than a device can announce."""

NARROWEST = 1e-4
"""The least range of a truncated normal distribution, in standard deviations. Draws outside of it are repeated."""


def _levels(value: Any) -> Any:
    """One number is one level, and 0 is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value,) if value else ()
    return tuple(value) if isinstance(value, list) else value


class Fleet(Section):
    """How many devices there are, how many are asked, and how long they are waited for.

    ``deadline`` is in seconds of the experiment's clock. ``start_timeout``, ``give_up`` and ``answer_timeout``, which
    is for the first result of an ask, are in real seconds. ``link`` says whether each device has a connection of its
    own to the coordinator, or all devices of a machine share one. ``wake`` says whether devices live at once, or sleep
    until they are asked: a device that sleeps costs no process.
    """

    devices: Count = 300
    per_round: Count = 30
    over_selection: Annotated[float, Field(ge=1, le=2**31 - 1)] = 1.0
    deadline: Positive = 600.0
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    attempts: Count = 3
    start_timeout: Positive = 60.0
    give_up: Positive = 60.0
    answer_timeout: Positive = 600.0
    link: Literal["own", "shared"] = "own"
    wake: Literal["at-once", "on-demand"] = "at-once"

    @property
    def asked(self) -> int:
        """The number of devices that a round asks."""
        return min(ceil_share(self.over_selection, self.per_round), self.devices)

    @property
    def awake(self) -> int:
        """The most devices that are alive in a round that asks ``asked`` devices."""
        return self.devices if self.wake == "at-once" else self.asked


class Tree(Section):
    """The edges between the coordinator and the machines of ``fedemu run``: how many, level by level from the top.

    Each edge of the lowest level has a supervisor of its own behind it, with its share of the devices.
    """

    edges: Annotated[
        tuple[Annotated[int, Field(ge=1, le=256)], ...], BeforeValidator(_levels), Field(max_length=8)
    ] = ()


class Always(Section):
    """Every device is always on-line."""

    kind: Literal["always"] = "always"


class Exponential(Section):
    """Spells are drawn from exponential distributions with these means."""

    kind: Literal["exponential"] = "exponential"
    mean_online: Spell = 3600.0
    mean_offline: Spell = 1800.0


class Weibull(Section):
    """Spells are drawn from Weibull(shape, scale). A shape below 1 makes many short spells and a few very long ones."""

    kind: Literal["weibull"] = "weibull"
    shape: Annotated[float, Field(ge=0.1, le=100)] = 0.7
    scale_online: Spell = 3600.0
    scale_offline: Spell = 1800.0


class Diurnal(Section):
    """A device is on-line with a probability that follows the hour.

    It draws anew every ``spell`` seconds on average.
    """

    kind: Literal["diurnal"] = "diurnal"
    mean: Rate = 0.5
    amplitude: Annotated[float, Field(ge=0, le=0.5)] = 0.4
    peak_hour: Annotated[float, Field(ge=0, lt=24)] = 2.0
    spread_hours: Annotated[float, Field(ge=0, le=_LARGEST)] = 2.0
    spell: Spell = 3600.0

    @model_validator(mode="after")
    def _is_a_probability(self) -> Diurnal:
        if self.mean - self.amplitude < 0 or self.mean + self.amplitude > 1:
            raise ValueError(
                f"availability.amplitude = {self.amplitude} takes availability.mean = {self.mean} out of 0 to 1; "
                f"it may be at most {min(self.mean, 1 - self.mean):g}"
            )
        return self


class AvailabilityTrace(Section):
    """Devices follow recorded intervals from a CSV file. ``docs/configuration.md`` describes its columns."""

    kind: Literal["trace"] = "trace"
    file: Text
    policy: str = ""
    state: str = "train"
    at_end: Literal["wrap", "end"] = "wrap"
    bootstrap: bool = False


Availability = Annotated[Always | Exponential | Weibull | Diurnal | AvailabilityTrace, Field(discriminator="kind")]


class Fixed(Section):
    """All devices have this value."""

    kind: Literal["fixed"] = "fixed"
    value: NotNegative


class Uniform(Section):
    """Values are drawn evenly between ``low`` and ``high``."""

    kind: Literal["uniform"] = "uniform"
    low: NotNegative
    high: Positive

    @model_validator(mode="after")
    def _is_ordered(self) -> Uniform:
        if self.low > self.high:
            raise ValueError(
                f"a uniform distribution needs low <= high, but has low = {self.low} and high = {self.high}"
            )
        return self


class Normal(Section):
    """Values are drawn from a truncated normal distribution: again and again, until one lies within [low, high]."""

    kind: Literal["normal"] = "normal"
    mean: Positive
    std: NotNegative
    low: NotNegative = 0.0
    high: Positive = 1e12

    @model_validator(mode="after")
    def _holds_its_mean(self) -> Normal:
        if not self.low <= self.mean <= self.high:
            raise ValueError(
                f"a truncated normal distribution needs low <= mean <= high, but has "
                f"low = {self.low}, mean = {self.mean} and high = {self.high}"
            )
        if self.high - self.low < NARROWEST * self.std:
            raise ValueError(
                f"a truncated normal distribution with std = {self.std} hardly ever gives a value from "
                f"low = {self.low} to high = {self.high}; lower std, or move low and high apart"
            )
        return self


class Lognormal(Section):
    """Values are drawn from a lognormal distribution. ``sigma`` is the standard deviation of their logarithm."""

    kind: Literal["lognormal"] = "lognormal"
    median: Positive
    sigma: NotNegative


class ComputeTrace(Section):
    """Seconds per sample follow scores in a file.

    A device with the median score takes ``median`` seconds. A device with twice that score takes half as long.
    """

    kind: Literal["trace"] = "trace"
    file: Text
    column: Text = "ai_score"
    weight: str = ""
    median: Positive = 0.01


class NetworkTrace(Section):
    """Speeds come from a file. ``deviation`` is the spread from round to round.

    Columns ``*_kBps`` are in 1,000 byte/s.
    """

    kind: Literal["trace"] = "trace"
    file: Text
    column: Text = AUTO
    deviation: str = AUTO
    weight: str = ""


def _which(value: Any) -> str | None:
    """The tag by which pydantic chooses the kind of a quantity. A bare number is a fixed value."""
    if isinstance(value, Mapping):
        kind = value.get("kind")
        return kind if isinstance(kind, str) else None
    if isinstance(value, BaseModel):
        return str(getattr(value, "kind", None))
    return "number"


Drawn = Fixed | Uniform | Normal | Lognormal

_TaggedDrawn = (
    Annotated[Fixed, Tag("fixed")]
    | Annotated[Uniform, Tag("uniform")]
    | Annotated[Normal, Tag("normal")]
    | Annotated[Lognormal, Tag("lognormal")]
)
Quantity = Annotated[Annotated[NotNegative, Tag("number")] | _TaggedDrawn, Discriminator(_which)]
Compute = Annotated[
    Annotated[NotNegative, Tag("number")] | _TaggedDrawn | Annotated[ComputeTrace, Tag("trace")], Discriminator(_which)
]
Network = Annotated[
    Annotated[Positive, Tag("number")] | _TaggedDrawn | Annotated[NetworkTrace, Tag("trace")], Discriminator(_which)
]


class Profile(Section):
    """How fast a device computes and transfers. ``latency`` is in seconds, for one direction."""

    seconds_per_sample: Compute = 0.01
    down_kbps: Network = 20000.0
    up_kbps: Network = 5000.0
    latency: Quantity = 0.05

    @model_validator(mode="after")
    def _can_transfer(self) -> Profile:
        for key in ("down_kbps", "up_kbps"):
            match getattr(self, key):
                case Fixed(value=0.0) | Uniform(low=0.0):
                    raise ValueError(
                        f"profile.{key} may come out as 0, but a device needs some bandwidth; raise its low end"
                    )
        return self


class Faults(Section):
    """Planned failures. Rates are per selected device and round. A device that drops out is back after ``downtime``."""

    crash_rate: Rate = 0.0
    leave_rate: Rate = 0.0
    silence_rate: Rate = 0.0
    corrupt_rate: Rate = 0.0
    duplicate_rate: Rate = 0.0
    decline_rate: Rate = 0.0
    corruptions: Annotated[tuple[Literal["nan", "shape", "truncate"], ...], Field(min_length=1)] = (
        "nan",
        "shape",
        "truncate",
    )
    downtime: Quantity = 60.0

    @model_validator(mode="after")
    def _add_up(self) -> Faults:
        for names in (("crash", "leave", "silence"), ("corrupt", "duplicate", "decline")):
            total = math.fsum(getattr(self, f"{name}_rate") for name in names)
            if total > 1:
                keys = " + ".join(f"faults.{name}_rate" for name in names)
                raise ValueError(f"{keys} = {total:g} is more than 1, but at most one of them can happen to a device")
        return self


class ProfileRows(Section):
    """The content of a trace file: one value per recorded device, in the unit of the key.

    A device draws one row for all quantities that come from the same ``file``.
    """

    file: str
    values: tuple[Positive, ...]
    deviations: tuple[NotNegative, ...]
    weights: tuple[NotNegative, ...]


class Traces(Section):
    """The content of trace files. With it the bytes of an experiment need no files. It is not part of the TOML.

    ``availability`` holds start, end, start, end, ... for each recorded device, ascending. The last end is left out if
    the device stayed on-line. ``last_event`` is the latest time in the file, over all devices.
    """

    availability: tuple[tuple[NotNegative, ...], ...] = ()
    last_event: NotNegative = 0.0
    profile: dict[str, ProfileRows] = Field(default_factory=dict)
