"""The tables of an experiment that say what devices see when, and what they keep of it: stream and replay.

Every kind of stream has ``period_count``, ``rounds_each``, ``seconds``, ``arrivals``, ``cumulative`` and ``columns``
(those of the data set that it reads), whatever its own keys are called.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedemu.ops.experiment.tables.section import Count, NotNegative, Positive, Section, Text

LABEL = "label"
"""Stands for the labels, where a column of values is named."""
LONGEST = 1e8
"""Seconds, some three years, that all periods may take: devices tell of 65,536 spells on-line at most, and that of half
an hour each."""
INDEX = "index"
"""Stands for the order of the training split, where a column of times is named."""

Cut = Literal["device", "fleet"]
Strategy = Literal[
    "none",
    "naive_uniform",
    "approximation_of_uniform",
    "fixed_proportion",
    "reservoir",
    "class_balanced",
    "herding",
    "gss_greedy",
    "gss_cluster",
    "diversity_convex",
    "diversity",
    "coordinated",
]


class Static(Section):
    """A device has all of its samples from the beginning to the end."""

    kind: Literal["static"] = "static"

    @property
    def period_count(self) -> int:
        return 1

    @property
    def rounds_each(self) -> int:
        return 1

    @property
    def seconds(self) -> float:
        return 0.0

    @property
    def arrivals(self) -> Literal["start"]:
        return "start"

    @property
    def cumulative(self) -> bool:
        return False

    @property
    def columns(self) -> tuple[str, ...]:
        return ()


class _Periodic(Section):
    """What streams of several periods share.

    A period begins ``period_seconds`` of the experiment's clock after the one before it, or as soon as that one's
    rounds are over if this is later. With ``cumulative`` nothing that has arrived is ever gone.
    """

    period_seconds: NotNegative = 0.0
    arrivals: Literal["start", "poisson", "order"] = "start"
    cumulative: bool = False

    @property
    def seconds(self) -> float:
        return self.period_seconds

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    @model_validator(mode="after")
    def _has_time_for_arrivals(self) -> _Periodic:
        if self.arrivals != "start" and not self.period_seconds:
            raise ValueError(
                f'stream.arrivals = "{self.arrivals}" spreads samples over their period, which needs a length; '
                "set stream.period_seconds"
            )
        if self.arrivals == "order" and not isinstance(self, Periods):
            raise ValueError(
                'stream.arrivals = "order" goes by the numbers that order the samples; set stream.kind = "periods"'
            )
        return self


class _Divided(_Periodic):
    periods: Count = 10
    rounds_per_period: Count = 5

    @property
    def period_count(self) -> int:
        return self.periods

    @property
    def rounds_each(self) -> int:
        return self.rounds_per_period


class Periods(_Divided):
    """Samples in an order, that of a column of numbers or of the training split, cut into periods.

    The last ``test_fraction`` of each period is what it is tested on.
    """

    kind: Literal["periods"] = "periods"
    order: Text = INDEX
    cut: Cut = "device"
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.order == INDEX else (self.order,)


class _Drifting(_Divided):
    column: Text = LABEL
    cut: Cut = "fleet"

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.column == LABEL else (self.column,)


class Drift(_Drifting):
    """Each period has its own shares of a column's values, drawn from Dirichlet(alpha)."""

    kind: Literal["drift"] = "drift"
    alpha: Positive = 0.3


class Window(_Drifting):
    """A window over a column's values, in a random order, slides from period to period; it covers ``width`` values."""

    kind: Literal["window"] = "window"
    width: Annotated[float, Field(ge=1)] = 2.0


class Classes(_Periodic):
    """Every period is a task that brings classes of its own; ``order`` names all of them, or is drawn where empty."""

    kind: Literal["classes"] = "classes"
    tasks: Count = 5
    rounds_per_task: Count = 5
    order: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @property
    def period_count(self) -> int:
        return self.tasks

    @property
    def rounds_each(self) -> int:
        return self.rounds_per_task

    @model_validator(mode="after")
    def _names_each_class_once(self) -> Classes:
        repeated = [name for name in self.order if self.order.count(name) > 1]
        if repeated:
            raise ValueError(f"stream.order names class {repeated[0]} more than once; name every class once, or none")
        return self


Stream = Annotated[Static | Periods | Drift | Window | Classes, Field(discriminator="kind")]


def in_words(stream: Stream, rounds: int) -> str:
    """The stream in a few words, and how far so many rounds come in it if that is not to its end."""
    if stream.period_count == 1:
        return "1 period"
    reached = min(-(-rounds // stream.rounds_each), stream.period_count)
    text = f"{stream.period_count} periods of {stream.rounds_each} rounds"
    return text if reached == stream.period_count else f"{text}, of which {rounds} rounds reach {reached}"


class Replay(Section):
    """What a device keeps of periods that are over: ``capacity`` in samples, ``memory_mib`` of a trainer's memory."""

    strategy: Strategy = "none"
    capacity: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    budget: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    proportion: Annotated[float, Field(gt=0, lt=1)] = 0.5
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    iterations: Annotated[int, Field(ge=0, le=1000)] = 1
    targets: Literal["mean", "each"] = "mean"
    final: Literal["zero_diagonal", "convex"] = "zero_diagonal"
    census: bool = True
    memory_mib: Count = 512

    @property
    def kept(self) -> int:
        """How many samples a device keeps after a period: the budget that applies, 0 without a strategy."""
        return 0 if self.strategy == "none" else self.budget or self.capacity

    @model_validator(mode="after")
    def _fits_its_storage(self) -> Replay:
        if self.strategy != "none" and not self.capacity:
            raise ValueError(
                f'replay.strategy = "{self.strategy}" has no room to keep samples in; '
                "set replay.capacity to the number of samples that a device can store"
            )
        if self.budget > self.capacity:
            raise ValueError(
                f"replay.budget = {self.budget} is more than replay.capacity = {self.capacity}; "
                "lower the budget, or raise the capacity"
            )
        return self
