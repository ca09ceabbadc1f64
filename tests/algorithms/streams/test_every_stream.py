"""What holds for the streams of every kind."""

import math

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.data.partitioners import dirichlet
from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.algorithms.streams.periods import consecutive, dirichlet_drift, static, window_drift
from fedemu.algorithms.streams.tasks import ClassTasks, class_incremental, own_orders
from fedemu.algorithms.streams.times import poisson
from fedemu.protocol.errors import ConfigurationError


def seeded(seed=0):
    return np.random.default_rng(seed)


def by_period(arrivals, device):
    return [arrivals.arrived(device, period, math.inf).tolist() for period in range(arrivals.period_count)]


def make(name, labels, shares, periods, seed):
    if name.startswith("consecutive"):
        return consecutive(labels, shares, periods, cut=name.split()[1], test_fraction=0.5)
    if name == "tasks":
        tasks = ClassTasks.of(4, min(periods, 4), seeded(seed).permutation(4))
        return class_incremental(labels, labels, shares, tasks, generator=seeded(seed))
    if name == "own orders":
        tasks = own_orders(ClassTasks.of(4, min(periods, 4), seeded(seed).permutation(4)), len(shares), seed)
        try:
            return class_incremental(labels, labels, shares, tasks, generator=seeded(seed))
        except ConfigurationError:  # a period in which no device has a sample
            reject()
    if name == "static":
        return static(shares, 3)
    drift, cut = name.split()
    if drift == "dirichlet":
        return dirichlet_drift(labels, labels, shares, periods, alpha=0.3, generator=seeded(seed), cut=cut)
    return window_drift(labels, labels, shares, periods, width=1.5, generator=seeded(seed), cut=cut)


def every_stream(test):
    """Run a test with drawn cases for each kind of stream. All cases have enough samples for their periods."""
    names = [f"{kind} {cut}" for kind in ("consecutive", "dirichlet", "window") for cut in ("device", "fleet")]
    cases = given(
        labels=st.lists(st.integers(0, 3), max_size=20).map(lambda drawn: np.array([0, 1, 2, 3] * 10 + drawn)),
        devices=st.integers(1, 6),
        periods=st.integers(1, 4),
        seed=st.integers(0, 1000),
    )
    return pytest.mark.parametrize("name", ["static", "tasks", "own orders", *names])(
        settings(max_examples=8)(cases(test))
    )


def divided(labels, devices, seed):
    shares = dirichlet(labels, devices, alpha=0.5, min_samples=0, generator=seeded(seed))
    return Partition.of(shares, 0.2, seeded(seed))


@every_stream
def test_every_training_sample_arrives_once_or_is_held_out(name, labels, devices, periods, seed):
    shares = divided(labels, devices, seed)
    arrivals, tests = make(name, labels, shares, periods, seed)
    held_out = tests.indices.tolist() if tests.held_out else []
    assert sorted([*arrivals.indices, *held_out]) == sorted(shares.train_indices)
    assert len(np.unique(tests.indices)) == len(tests.indices)
    for device in range(devices):
        assert set(arrivals.everything(device, arrivals.period_count - 1)) <= set(shares.device(device)[0])


@every_stream
def test_samples_of_other_periods_are_out_of_reach_and_everything_is_their_union(name, labels, devices, periods, seed):
    arrivals, _ = make(name, labels, divided(labels, devices, seed), periods, seed)
    for device in range(devices):
        older = []
        for period, now in enumerate(by_period(arrivals, device)):
            assert not set(now) & set(older)
            older += now
            assert arrivals.everything(device, period).tolist() == older


@every_stream
def test_the_same_generator_makes_the_same_stream(name, labels, devices, periods, seed):
    shares = divided(labels, devices, seed)
    first, second = (make(name, labels, shares, periods, seed) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert vars(one).keys() == vars(other).keys()
        assert all(np.array_equal(value, vars(other)[name]) for name, value in vars(one).items())


@every_stream
def test_poisson_arrivals_keep_the_order_and_are_valid(name, labels, devices, periods, seed):
    arrivals, _ = make(name, labels, divided(labels, devices, seed), periods, seed)
    timed = Arrivals.from_arrays(poisson(arrivals, 60.0, generator=seeded(seed)).to_arrays())
    assert timed.indices.tolist() == arrivals.indices.tolist()
    assert timed.periods.tolist() == arrivals.periods.tolist()
    assert timed.seconds.max() < 60.0
