"""Profiles of devices: how fast each one is, drawn from fixed values, distributions and tables."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fedemu.device.behaviour.profile import (
    Fixed,
    Lognormal,
    Normal,
    Profile,
    Quantity,
    Recorded,
    Uniform,
    draw_profile,
    transfer_seconds,
)
from fedemu.protocol.seeds import generator


def quantities(**changed: Quantity) -> dict[str, Quantity]:
    return {
        "seconds_per_sample": Fixed(0.01),
        "down_kbps": Fixed(8000.0),
        "up_kbps": Fixed(1000.0),
        "latency": Fixed(0.05),
    } | changed


def test_a_kilobit_is_a_thousand_bits() -> None:
    assert transfer_seconds(1_000_000, 8000.0) == 1.0


def test_fixed_quantities_are_the_profile() -> None:
    assert draw_profile(1, 2, quantities()) == Profile(0.01, 8000.0, 1000.0, 0.05)


def test_a_profile_is_a_function_of_seed_and_device() -> None:
    drawn = quantities(seconds_per_sample=Lognormal(0.01, 0.5), latency=Uniform(0.0, 1.0))
    assert draw_profile(1, 2, drawn) == draw_profile(1, 2, drawn)
    assert draw_profile(1, 2, drawn) != draw_profile(1, 3, drawn)
    assert draw_profile(1, 2, drawn) != draw_profile(2, 2, drawn)


def test_a_quantity_keeps_its_draw_when_another_one_changes() -> None:
    before = draw_profile(1, 2, quantities(up_kbps=Uniform(1.0, 2.0)))
    after = draw_profile(1, 2, quantities(up_kbps=Uniform(1.0, 2.0), latency=Uniform(0.0, 1.0)))
    assert before.up_kbps == after.up_kbps


def test_the_distributions_have_the_moments_that_they_name() -> None:
    random = generator(5, purpose="test")
    assert {type(kind(2.0, 6.0).draw(random)) for kind in (Uniform, Lognormal, Normal)} == {float}
    uniform = [Uniform(2.0, 6.0).draw(random) for _ in range(4000)]
    assert np.mean(uniform) == pytest.approx(4.0, abs=0.1)
    assert min(uniform) >= 2.0
    assert max(uniform) <= 6.0
    lognormal = np.array([Lognormal(3.0, 0.5).draw(random) for _ in range(4000)])
    assert np.median(lognormal) == pytest.approx(3.0, rel=0.05)
    assert np.log(lognormal).std() == pytest.approx(0.5, rel=0.05)
    normal = np.array([Normal(10.0, 2.0).draw(random) for _ in range(4000)])
    assert normal.mean() == pytest.approx(10.0, abs=0.15)
    assert normal.std() == pytest.approx(2.0, rel=0.05)


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("sigma", [20_000.0, 1e308])
def test_a_lognormal_value_is_above_0_and_finite_however_wide_the_distribution_is(sigma: float) -> None:
    """Such as that of a speed whose ``sigma`` somebody gave in kbps: it must not take a device down."""
    random = generator(5, purpose="test")
    drawn = [Lognormal(20_000.0, sigma).draw(random) for _ in range(20)]
    assert 0.0 < min(drawn) < 1e-300
    assert 1e300 < max(drawn) < math.inf
    assert transfer_seconds(1_000, min(drawn)) > 1e300


def test_a_truncated_normal_stays_within_its_bounds() -> None:
    random = generator(5, purpose="test")
    values = [Normal(1.0, 5.0, low=0.5, high=2.0).draw(random) for _ in range(500)]
    assert min(values) >= 0.5
    assert max(values) <= 2.0
    assert [Normal(2.0, 0.0, *bounds).draw(random) for bounds in ((2.0, 3.0), (1.0, 2.0))] == [2.0, 2.0]


def test_rows_are_drawn_in_proportion_to_their_weights() -> None:
    recorded = Recorded("file", (1.0, 2.0, 3.0), (0.0, 0.0, 0.0), (1.0, 0.0, 3.0))
    rows = [recorded.row(generator(1, device=device, purpose="test")) for device in range(4000)]
    assert rows.count(1) == 0
    assert rows.count(2) / 4000 == pytest.approx(0.75, abs=0.03)


def test_quantities_of_one_file_come_from_one_row() -> None:
    values = tuple(float(value) for value in range(1, 101))
    tenfold, hundredfold = (tuple(times * value for value in values) for times in (10, 100))
    down = Recorded("network", values, hundredfold, (1.0,) * 100)
    up = Recorded("network", tenfold, tenfold, (1.0,) * 100)
    other = Recorded("compute", values, (0.0,) * 100, (1.0,) * 100)
    profiles = [
        draw_profile(1, device, quantities(down_kbps=down, up_kbps=up, seconds_per_sample=other))
        for device in range(50)
    ]
    assert all(profile.up_kbps == profile.up_spread == 10 * profile.down_kbps for profile in profiles)
    assert all(profile.down_spread == 100 * profile.down_kbps for profile in profiles)
    assert len({profile.down_kbps for profile in profiles}) > 10
    assert any(profile.seconds_per_sample != profile.down_kbps for profile in profiles)


def test_speeds_without_a_spread_are_the_same_in_every_round() -> None:
    profile = Profile(0.01, 8000.0, 1000.0, 0.05)
    assert profile.speeds(1, 2, 3) == profile.speeds(1, 2, 4) == (8000.0, 1000.0)


@pytest.mark.parametrize("spreads", [(8000.0, 10.0), (10.0, 1000.0)])
def test_speeds_with_a_spread_change_by_round_and_never_fall_below_a_tenth(spreads: tuple[float, float]) -> None:
    profile = Profile(0.01, 8000.0, 1000.0, 0.05, *spreads)
    drawn = zip(*(profile.speeds(1, 2, round) for round in range(2000)), strict=True)
    for speeds, mean, spread in zip(drawn, (8000.0, 1000.0), spreads, strict=True):
        assert len(set(speeds)) == 2000
        assert min(speeds) >= 0.1 * mean
        if spread == mean:
            assert min(speeds) < 0.12 * mean
        else:
            assert np.mean(speeds) == pytest.approx(mean, abs=1.0)
            assert np.std(speeds) == pytest.approx(10.0, rel=0.06)


def test_speeds_are_a_function_of_seed_device_and_round_and_each_has_its_own_spread() -> None:
    both = Profile(0.01, 8000.0, 1000.0, 0.05, down_spread=10.0, up_spread=10.0)
    places = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]
    assert [both.speeds(*place) for place in places] == [both.speeds(*place) for place in places]
    assert len({both.speeds(*place)[0] for place in places}) == 4
    down, up = both.speeds(1, 2, 3)
    random = generator(1, round=3, device=2, purpose="network")
    assert [down, up] == pytest.approx([mean + 10.0 * random.standard_normal() for mean in (8000.0, 1000.0)])
    assert replace(both, up_spread=0.0).speeds(1, 2, 3) == (down, 1000.0)
    assert replace(both, down_spread=0.0).speeds(1, 2, 3) == (8000.0, up)
