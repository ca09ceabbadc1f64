"""The tables ``[stream]`` and ``[replay]``: which samples devices see in which period, and which of them they keep.

Whatever its own keys are called, every kind of stream has ``period_count``, ``rounds_each`` (rounds of a period),
``seconds`` (of a period), ``arrivals``, ``cumulative``, and ``columns`` (those of the data set that it reads).
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedemu.ops.experiment.tables.section import Count, NotNegative, Positive, Section, Text

LABEL = "label"
"""The name of the labels, where a setting names a column."""
LONGEST = 1e8
"""Seconds that all periods may take together, some three years. A device can announce 65,536 spells at most."""
INDEX = "index"
"""The name of the order of the training split, where a setting names a column of times."""

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
    "gss_iqp",
    "diversity_convex",
    "diversity",
    "coordinated",
    "fedcbdr",
    "own",
]


class Static(Section):
    """A stream of one period: a device has all of its samples from the beginning to the end."""

    kind: Literal["static"] = "static"

    @property
    def period_count(self) -> int:
        """The number of periods."""
        return 1

    @property
    def rounds_each(self) -> int:
        """The number of rounds of a period."""
        return 1

    @property
    def seconds(self) -> float:
        """The length of a period on the experiment's clock, in seconds. 0 means that only rounds divide the stream."""
        return 0.0

    @property
    def arrivals(self) -> Literal["start"]:
        """How samples arrive in their period: all at its start."""
        return "start"

    @property
    def cumulative(self) -> bool:
        """Whether samples stay at a device after their period."""
        return False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the data set that the stream reads."""
        return ()


class _Periodic(Section):
    """What streams of several periods have in common.

    A period begins ``period_seconds`` after the one before it, on the experiment's clock. If the rounds of the
    earlier period take longer, the later period begins when they are over. With ``cumulative`` samples stay at a device
    after their period.
    """

    period_seconds: NotNegative = 0.0
    arrivals: Literal["start", "poisson", "order"] = "start"
    cumulative: bool = False

    @property
    def seconds(self) -> float:
        """The length of a period on the experiment's clock, in seconds. 0 means that only rounds divide the stream."""
        return self.period_seconds

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the data set that the stream reads."""
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
    """A stream that is cut into a number of periods."""

    periods: Count = 10
    rounds_per_period: Count = 5

    @property
    def period_count(self) -> int:
        """The number of periods."""
        return self.periods

    @property
    def rounds_each(self) -> int:
        """The number of rounds of a period."""
        return self.rounds_per_period


class Periods(_Divided):
    """Samples are ordered by a column of numbers, by label or as in the training split. The order is cut into periods.

    The last ``test_fraction`` of each period is used to test it.
    """

    kind: Literal["periods"] = "periods"
    order: Text = INDEX
    cut: Cut = "device"
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.2

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the data set that the stream reads."""
        return () if self.order in (INDEX, LABEL) else (self.order,)


class _Drifting(_Divided):
    """A stream whose periods differ in the values of a column, or in the labels."""

    column: Text = LABEL
    cut: Cut = "fleet"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the data set that the stream reads."""
        return () if self.column == LABEL else (self.column,)


class Drift(_Drifting):
    """Each period has its own shares of the values of a column. They are drawn from Dirichlet(alpha)."""

    kind: Literal["drift"] = "drift"
    alpha: Positive = 0.3


class Window(_Drifting):
    """The values of a column are put in a random order.

    A window over ``width`` of them slides from period to period.
    """

    kind: Literal["window"] = "window"
    width: Annotated[float, Field(ge=1)] = 2.0


class Classes(_Periodic):
    """Every period is a task that brings classes of its own.

    ``order`` names all classes. If it is empty, the order is drawn. With ``order_by = "device"`` each device meets the
    tasks in an order of its own, which is drawn.
    """

    kind: Literal["classes"] = "classes"
    tasks: Count = 5
    rounds_per_task: Count = 5
    order: tuple[Annotated[int, Field(ge=0)], ...] = ()
    # The default is left out of an experiment's bytes, so that experiments from before this setting keep their digests.
    order_by: Literal["fleet", "device"] = Field(default="fleet", exclude_if=lambda by: by == "fleet")

    @property
    def period_count(self) -> int:
        """The number of periods."""
        return self.tasks

    @property
    def rounds_each(self) -> int:
        """The number of rounds of a period."""
        return self.rounds_per_task

    @model_validator(mode="after")
    def _names_each_class_once(self) -> Classes:
        repeated = [name for name in self.order if self.order.count(name) > 1]
        if repeated:
            raise ValueError(f"stream.order names class {repeated[0]} more than once; name every class once, or none")
        return self


Stream = Annotated[Static | Periods | Drift | Window | Classes, Field(discriminator="kind")]


def in_words(stream: Stream, rounds: int) -> str:
    """Describe a stream in a few words. If ``rounds`` do not reach its last period, say how far they reach."""
    if stream.period_count == 1:
        return "1 period"
    reached = min(-(-rounds // stream.rounds_each), stream.period_count)
    each = f"{stream.rounds_each} round{'' if stream.rounds_each == 1 else 's'}"
    text = f"{stream.period_count} periods of {each}"
    if reached == stream.period_count:
        return text
    played = "1 round reaches" if rounds == 1 else f"{rounds} rounds reach"
    return f"{text}, of which {played} {reached}"


class Replay(Section):
    """Which samples of earlier periods a device keeps. ``capacity`` and ``budget`` are numbers of samples.

    ``memory_mib`` is the memory of a trainer that a selection may use.
    """

    strategy: Strategy = "none"
    capacity: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    budget: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    proportion: Annotated[float, Field(gt=0, lt=1)] = 0.5
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    iterations: Annotated[int, Field(ge=0, le=1000)] = 1
    targets: Literal["mean", "each"] = "mean"
    final: Literal["zero_diagonal", "convex"] = "zero_diagonal"
    objective: Literal["cheap", "always", "never"] = "cheap"
    census: bool = True
    memory_mib: Count = 512

    @property
    def kept(self) -> int:
        """The number of samples that a device keeps after a period. 0 without a strategy."""
        return 0 if self.strategy == "none" else self.budget or self.capacity

    @property
    def room(self) -> int:
        """The largest number of samples that a device may keep. Where devices share a budget, it is the capacity."""
        return self.capacity if self.strategy == "fedcbdr" else self.kept

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
