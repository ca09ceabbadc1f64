"""The tables of an experiment that say who learns: fleet, availability, profile, faults, and recorded traces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from fedemu.ops.experiment.tables.section import AUTO, Count, NotNegative, Positive, Rate, Section, Text

Spell = Annotated[float, Field(ge=0.1)]
"""The length of a spell in seconds; far shorter ones would make more intervals than anyone can announce."""


class Fleet(Section):
    """``deadline`` is on the experiment's clock; ``start_timeout`` and ``give_up`` are real seconds."""

    devices: Count = 300
    per_round: Count = 30
    over_selection: Annotated[float, Field(ge=1)] = 1.0
    deadline: Positive = 600.0
    quorum: Annotated[float, Field(gt=0, le=1)] = 0.5
    attempts: Count = 3
    start_timeout: Positive = 60.0
    give_up: Positive = 60.0


class Always(Section):
    kind: Literal["always"] = "always"


class Exponential(Section):
    kind: Literal["exponential"] = "exponential"
    mean_online: Spell = 3600.0
    mean_offline: Spell = 1800.0


class Weibull(Section):
    """Spells drawn from Weibull(shape, scale); a shape below 1 makes many short and few very long ones."""

    kind: Literal["weibull"] = "weibull"
    shape: Annotated[float, Field(ge=0.1, le=100)] = 0.7
    scale_online: Spell = 3600.0
    scale_offline: Spell = 1800.0


class Diurnal(Section):
    """On-line with a probability that follows the hour; a device decides anew every ``spell`` seconds on average."""

    kind: Literal["diurnal"] = "diurnal"
    mean: Rate = 0.5
    amplitude: Annotated[float, Field(ge=0, le=0.5)] = 0.4
    peak_hour: Annotated[float, Field(ge=0, lt=24)] = 2.0
    spread_hours: NotNegative = 2.0
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
    """Recorded intervals from a CSV of device, start, end; ``docs/configuration.md`` tells the columns."""

    kind: Literal["trace"] = "trace"
    file: Text
    policy: str = ""
    state: str = "train"
    at_end: Literal["wrap", "end"] = "wrap"
    bootstrap: bool = False


Availability = Annotated[Always | Exponential | Weibull | Diurnal | AvailabilityTrace, Field(discriminator="kind")]


class Fixed(Section):
    kind: Literal["fixed"] = "fixed"
    value: NotNegative


class Uniform(Section):
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
    """Truncated: drawn again until within [low, high]."""

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
        return self


class Lognormal(Section):
    kind: Literal["lognormal"] = "lognormal"
    median: Positive
    sigma: NotNegative


class ComputeTrace(Section):
    """Scores from a file: the phone of the median score takes ``median`` seconds per sample, twice the score half."""

    kind: Literal["trace"] = "trace"
    file: Text
    column: Text = "ai_score"
    weight: str = ""
    median: Positive = 0.01


class NetworkTrace(Section):
    """Speeds from a file; columns ``*_kBps`` are in 1,000 byte/s. ``deviation`` is the spread from round to round."""

    kind: Literal["trace"] = "trace"
    file: Text
    column: Text = AUTO
    deviation: str = AUTO
    weight: str = ""


def _which(value: Any) -> str | None:
    """The tag of a quantity: a bare number is the fixed value."""
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
    """What a device is capable of; ``latency`` is one way."""

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
    """Planned misbehaviour, per selected device and round. A device that drops out is back after ``downtime``."""

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
    """One row per recorded device, in the unit of the key; quantities from one ``file`` are drawn as one row."""

    file: str
    values: tuple[Positive, ...]
    deviations: tuple[NotNegative, ...]
    weights: tuple[NotNegative, ...]


class Traces(Section):
    """The content of trace files, so that an experiment's bytes stand alone. Not part of the TOML.

    ``availability`` holds start, end, start, end, ... per recorded device, ascending; the last end is left out where
    a device never went away again. ``last_event`` is the latest time in the file, whichever device it belongs to.
    """

    availability: tuple[tuple[NotNegative, ...], ...] = ()
    last_event: NotNegative = 0.0
    profile: dict[str, ProfileRows] = Field(default_factory=dict)
