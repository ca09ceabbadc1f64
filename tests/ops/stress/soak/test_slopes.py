"""Slopes of sampled quantities: exact ones, robust ones, and those that are unknown."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy

from fedemu.ops.stress.soak.slopes import BINS, slope_of

HOURS = np.linspace(0.0, 0.5, 480)


def test_a_line_has_its_slope_and_no_doubt() -> None:
    found = slope_of(HOURS, 100.0 + 20.0 * HOURS)
    np.testing.assert_allclose([found.slope, found.low, found.high], 20.0)
    assert found.exceeds(19.0)
    assert not found.exceeds(21.0)
    assert not found.flat


def test_a_constant_is_flat_and_outliers_do_not_matter() -> None:
    values = np.full(480, 65.0)
    values[::10] = 900.0  # such as descriptors of connections that come and go
    found = slope_of(HOURS, values)
    assert (found.slope, found.low, found.high, found.middle) == (0.0, 0.0, 0.0, 65.0)


def test_noise_is_told_from_growth() -> None:
    noise = np.random.default_rng(3).normal(0.0, 2.0, 480)
    still, growing = slope_of(HOURS, 70.0 + noise), slope_of(HOURS, 70.0 + noise + 12.0 * HOURS)
    assert still.flat
    assert not still.exceeds(0.0)
    assert growing.exceeds(4.0)
    assert growing.low < 12.0 < growing.high
    np.testing.assert_allclose(growing.slope - still.slope, 12.0, atol=0.2)


@pytest.mark.parametrize("samples", [4, 5, 6, 8, 12, 20, 48])
def test_a_slope_and_its_interval_are_those_of_scipy_and_as_wide_to_both_sides(samples: int) -> None:
    times = np.arange(samples, dtype=np.float64)
    values = np.random.default_rng(1).normal(size=samples) + 0.1 * times
    found, mirrored = slope_of(times, values), slope_of(times, -values)
    expected = scipy.stats.theilslopes(values, times, 0.95)
    assert (found.slope, found.low, found.high) == (expected.slope, expected.low_slope, expected.high_slope)
    assert (mirrored.low, mirrored.high) == (-found.high, -found.low)


def test_a_few_samples_tell_nothing() -> None:
    assert math.isinf(slope_of([0.0, 1.0, 2.0], [1.0, 5.0, 9.0]).low)
    assert not slope_of([], []).exceeds(0.0)
    assert BINS >= 4
