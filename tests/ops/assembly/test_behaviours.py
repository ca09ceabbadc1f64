"""What an experiment's settings make of the behaviour of its devices."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from fedemu.device.behaviour import profile
from fedemu.device.behaviour.availability import Interval, Timetable, always, diurnal, exponential, recorded, weibull
from fedemu.device.behaviour.faults import FaultRates
from fedemu.ops.assembly.behaviours import intervals, open_behaviours
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.tables.fleet import Traces
from fedemu.protocol.seeds import generator


def until(source: partial[Iterator[Interval]]) -> tuple[Interval, ...]:
    return Timetable(source).until(1e5)


def random_of(device: int, purpose: str = "availability") -> Any:
    return generator(5, device=device, purpose=purpose)


@pytest.mark.parametrize(
    ("table", "source"),
    [
        ({"kind": "always"}, lambda random: always()),
        ({"kind": "exponential", "mean_online": 700, "mean_offline": 300}, lambda r: exponential(r, 700.0, 300.0)),
        (
            {"kind": "weibull", "shape": 0.5, "scale_online": 700, "scale_offline": 300},
            lambda random: weibull(random, 0.5, 700.0, 300.0),
        ),
        (
            {"kind": "diurnal", "mean": 0.6, "amplitude": 0.3, "peak_hour": 3, "spread_hours": 1, "spell": 900},
            lambda random: diurnal(random, 0.6, 0.3, 3.0, 1.0, 900.0),
        ),
    ],
)
def test_a_device_is_on_line_as_its_settings_its_number_and_the_seed_say(table: dict[str, Any], source: Any) -> None:
    experiment = Experiment.parse({"seed": 5, "availability": table})
    expected = until(partial(lambda: source(random_of(3))))
    assert until(partial(intervals, experiment, 3)) == expected
    assert open_behaviours(experiment.to_bytes())(3).presence(1e5) == expected


TRACE = {"seed": 5, "fleet": {"devices": 4, "per_round": 1}, "availability": {"kind": "trace", "file": "x"}}
FLAT = ((0.0, 3.0, 5.0), (1.0, 2.0))


def traced(**availability: Any) -> Experiment:
    bare = Experiment.parse({**TRACE, "availability": {**TRACE["availability"], **availability}})  # type: ignore[dict-item]
    return bare.model_copy(update={"traces": bare.traces.model_copy(update={"availability": FLAT, "last_event": 10.0})})


def test_a_trace_is_played_once_or_again_and_again() -> None:
    assert [until(partial(intervals, traced(at_end="end"), device)) for device in (1, 3)] == [((1.0, 2.0),)] * 2
    assert until(partial(intervals, traced(), 1)) == until(partial(recorded, FLAT[1], 10.0))


def test_a_phone_that_is_used_again_is_moved_by_a_share_of_the_period() -> None:
    shift = 10.0 * float(random_of(3, "availability/shift").random())
    assert until(partial(intervals, traced(), 3)) == until(partial(recorded, FLAT[1], 10.0, shift))


def test_measured_speeds_are_those_of_the_rows_of_a_file() -> None:
    measured = {"kind": "trace", "file": "x"}
    bare = Experiment.parse({"seed": 5, "profile": {"seconds_per_sample": measured, "up_kbps": measured}})
    rows = {"file": "x", "values": (1.0, 2.0, 4.0), "deviations": (8.0, 16.0, 32.0), "weights": (0.0, 1.0, 0.0)}
    traces = Traces.model_validate({"profile": {"seconds_per_sample": {**rows, "file": "y"}, "up_kbps": rows}})
    drawn = open_behaviours(bare.model_copy(update={"traces": traces}).to_bytes())(3).profile
    assert (drawn.seconds_per_sample, drawn.up_kbps, drawn.up_spread, drawn.down_spread) == (2.0, 2.0, 16.0, 0.0)


def test_speeds_and_faults_are_those_of_the_settings() -> None:
    experiment = Experiment.parse(
        {
            "seed": 5,
            "profile": {
                "seconds_per_sample": {"kind": "lognormal", "median": 0.02, "sigma": 0.5},
                "down_kbps": {"kind": "uniform", "low": 1000, "high": 9000},
                "up_kbps": {"kind": "normal", "mean": 500, "std": 200, "low": 400, "high": 900},
                "latency": {"kind": "fixed", "value": 0.25},
            },
            "faults": {
                "crash_rate": 0.01,
                "leave_rate": 0.02,
                "silence_rate": 0.03,
                "corrupt_rate": 0.04,
                "duplicate_rate": 0.05,
                "decline_rate": 0.06,
                "corruptions": ["shape", "nan"],
                "downtime": 9,
            },
        }
    )
    quantities: dict[str, profile.Quantity] = {
        "seconds_per_sample": profile.Lognormal(0.02, 0.5),
        "down_kbps": profile.Uniform(1000.0, 9000.0),
        "up_kbps": profile.Normal(500.0, 200.0, 400.0, 900.0),
        "latency": profile.Fixed(0.25),
    }
    behaviour = open_behaviours(experiment.to_bytes())(3)
    assert behaviour.device == 3
    assert behaviour.profile == profile.draw_profile(5, 3, quantities)
    assert vars(behaviour)["_seed"] == 5
    assert vars(behaviour)["_rates"] == FaultRates(
        crash=0.01,
        leave=0.02,
        silence=0.03,
        corrupt=0.04,
        duplicate=0.05,
        decline=0.06,
        corruptions=("shape", "nan"),
        downtime=profile.Fixed(9.0),
    )
