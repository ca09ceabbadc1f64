"""Makes the behaviour of devices from an experiment: when they are on-line, how fast they are, how they fail.

Device processes import this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import assert_never

from numpy.random import Generator

from fedemu.device.behaviour import availability, profile
from fedemu.device.behaviour.availability import Interval
from fedemu.device.behaviour.behaviour import Behaviour
from fedemu.device.behaviour.faults import FaultRates
from fedemu.ops.experiment import (
    Always,
    AvailabilityTrace,
    ComputeTrace,
    Diurnal,
    Drawn,
    Experiment,
    Exponential,
    Faults,
    Fixed,
    Lognormal,
    NetworkTrace,
    Normal,
    Uniform,
    Weibull,
)
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.seeds import generator


def open_behaviours(experiment: bytes) -> Callable[[int], Behaviour]:
    """Read an experiment, and return a function from the index of a device to its behaviour.

    Equal bytes give equal behaviours on every machine. Raises ConfigurationError if the bytes are no experiment, or
    name trace files without their content.
    """
    settings = Experiment.from_bytes(experiment)
    if settings.lacks_traces:
        raise ConfigurationError(
            "the experiment names trace files, but does not contain them; read it with load_experiment"
        )
    quantities = _quantities(settings)
    rates = _rates(settings.faults)

    def open_behaviour(device: int) -> Behaviour:
        drawn = profile.draw_profile(settings.seed, device, quantities)
        return Behaviour(settings.seed, device, partial(intervals, settings, device), drawn, rates)

    return open_behaviour


def intervals(settings: Experiment, device: int) -> Iterator[Interval]:
    """When a device is on-line: ascending intervals [start, end) in seconds, perhaps without an end."""

    def random(purpose: str = "availability") -> Generator:
        return generator(settings.seed, device=device, purpose=purpose)

    match settings.availability:
        case Always():
            return availability.always()
        case Exponential(mean_online=online, mean_offline=offline):
            return availability.exponential(random(), online, offline)
        case Weibull(shape=shape, scale_online=online, scale_offline=offline):
            return availability.weibull(random(), shape, online, offline)
        case Diurnal() as day:
            return availability.diurnal(random(), day.mean, day.amplitude, day.peak_hour, day.spread_hours, day.spell)
        case AvailabilityTrace(at_end=at_end):
            recorded, period = settings.traces.availability, settings.traces.last_event
            turn, phone = divmod(device, len(recorded))
            # Where nothing begins or ends after the start, there is nothing to repeat.
            if at_end == "end" or not period:
                return availability.recorded(recorded[phone], None)
            # A fleet that is larger than the trace uses each recorded device again, from another time on.
            shift = 0.0 if turn == 0 else float(random("availability/shift").random()) * period
            return availability.recorded(recorded[phone], period, shift)
        case other:
            assert_never(other)


def _quantities(settings: Experiment) -> dict[str, profile.Quantity]:
    keys = ("seconds_per_sample", "down_kbps", "up_kbps", "latency")
    return {key: _quantity(settings, key, getattr(settings.profile, key)) for key in keys}


def _quantity(settings: Experiment, key: str, value: float | Drawn | ComputeTrace | NetworkTrace) -> profile.Quantity:
    if isinstance(value, ComputeTrace | NetworkTrace):
        rows = settings.traces.profile[key]
        return profile.Recorded(rows.file, rows.values, rows.deviations, rows.weights)
    return _distribution(value)


def _distribution(value: float | Drawn) -> profile.Distribution:
    match value:
        case int() | float():
            return profile.Fixed(float(value))
        case Fixed():
            return profile.Fixed(value.value)
        case Uniform():
            return profile.Uniform(value.low, value.high)
        case Normal():
            return profile.Normal(value.mean, value.std, value.low, value.high)
        case Lognormal():
            return profile.Lognormal(value.median, value.sigma)
        case other:
            assert_never(other)


def _rates(faults: Faults) -> FaultRates:
    return FaultRates(
        crash=faults.crash_rate,
        leave=faults.leave_rate,
        silence=faults.silence_rate,
        corrupt=faults.corrupt_rate,
        duplicate=faults.duplicate_rate,
        decline=faults.decline_rate,
        corruptions=faults.corruptions,
        downtime=_distribution(faults.downtime),
    )
