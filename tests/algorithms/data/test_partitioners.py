"""Ways to divide samples over devices, on cases worked out by hand and by their properties."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedemu.algorithms.data import partitioners
from fedemu.algorithms.data.partitioners import by_id, dirichlet, dirichlet_equal, iid, resampled, shards
from fedemu.protocol.errors import ConfigurationError, DataError


class Scripted:
    """A generator with given proportions, one draw after the other, whose permutations change nothing."""

    def __init__(self, *proportions):
        self.proportions = list(proportions)

    def dirichlet(self, alpha, size=None):
        drawn = np.array(self.proportions.pop(0), dtype=np.float64)
        assert drawn.shape == ((len(alpha),) if size is None else (size, len(alpha)))
        return drawn

    def permutation(self, values):
        return np.arange(values) if np.isscalar(values) else np.array(values)

    def multinomial(self, n, weights):
        counts = np.floor(n * weights + 1e-9).astype(np.int64)
        counts[np.argmax(weights)] += n - counts.sum()
        return counts


def plain(result):
    return [share.tolist() for share in result]


def seeded(seed=0):
    return np.random.default_rng(seed)


# Dirichlet, free sizes


def test_each_class_is_cut_at_the_cumulative_proportions():
    labels = np.array([0, 1] * 10)
    generator = Scripted([[0.5, 0.3, 0.2], [0.05, 0.05, 0.9]])
    shares = plain(dirichlet(labels, 3, alpha=0.1, min_samples=0, generator=generator))
    # Class 0 has the even samples: 5, 3, 2 of ten. Class 1 has the odd ones: 0, 1, 9, because cuts are rounded down.
    assert shares == [[0, 2, 4, 6, 8], [1, 10, 12, 14], [3, 5, 7, 9, 11, 13, 15, 16, 17, 18, 19]]


def test_the_last_device_may_get_nothing():
    labels = np.zeros(2, dtype=np.int64)
    assert plain(dirichlet(labels, 2, alpha=0.1, min_samples=0, generator=Scripted([[1.0, 0.0]]))) == [[0, 1], []]


def test_devices_below_the_minimum_take_from_the_largest_in_index_order():
    labels = np.zeros(10, dtype=np.int64)
    generator = Scripted([[0.0, 0.5, 0.0, 0.5]])
    shares = plain(dirichlet(labels, 4, alpha=0.1, min_samples=2, generator=generator))
    # Devices 1 and 3 hold 5 each. Device 0 takes from 1 (a tie, the lower index), then from 3; so does device 2.
    assert shares == [[4, 9], [0, 1, 2], [3, 8], [5, 6, 7]]


def test_a_device_that_has_enough_keeps_what_was_drawn():
    labels = np.zeros(10, dtype=np.int64)
    shares = plain(dirichlet(labels, 2, alpha=0.1, min_samples=1, generator=Scripted([[0.1, 0.9]])))
    assert shares == [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9]]


def test_retry_draws_all_classes_again_until_the_minimum_holds():
    labels = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    generator = Scripted([[1.0, 0.0], [1.0, 0.0]], [[0.75, 0.25], [0.75, 0.25]])
    shares = plain(dirichlet(labels, 2, alpha=0.1, min_samples=2, generator=generator, retry=True))
    assert shares == [[0, 1, 2, 4, 5, 6], [3, 7]]
    assert generator.proportions == []


def test_retry_gives_up_with_the_numbers(monkeypatch):
    monkeypatch.setattr(partitioners, "MOST_DRAWS", 3)
    generator = Scripted(*[[[1.0, 0.0]]] * 3)
    with pytest.raises(DataError, match=r"none of 3 draws of Dirichlet\(0.1\) gave each of 2 devices 1 samples"):
        dirichlet(np.zeros(4, dtype=np.int64), 2, alpha=0.1, min_samples=1, generator=generator, retry=True)


def test_a_balanced_device_that_holds_an_even_part_gets_no_more():
    labels = np.array([0] * 4 + [1] * 4)
    generator = Scripted([[1.0, 0.0], [0.5, 0.5]])
    shares = plain(dirichlet(labels, 2, alpha=0.1, min_samples=0, generator=generator, balanced=True))
    # An even part of eight is four, so device 0 is full after the first class.
    assert shares == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_even_part_counts_the_samples_of_all_classes():
    labels = np.array([0] * 4 + [1] * 4 + [3] * 4)
    generator = Scripted([[0.75, 0.25], [0.75, 0.25], [0.5, 0.5], [0.5, 0.5]])
    shares = plain(dirichlet(labels, 2, alpha=0.1, min_samples=0, generator=generator, balanced=True))
    assert shares == [[0, 1, 2, 4, 5, 6], [3, 7, 8, 9, 10, 11]]


def test_balanced_renormalises_the_proportions_that_remain():
    labels = np.array([0] * 4 + [1] * 8)
    generator = Scripted([[1.0, 0.0, 0.0], [13 / 16, 1 / 16, 2 / 16]])
    shares = plain(dirichlet(labels, 3, alpha=0.1, min_samples=0, generator=generator, balanced=True))
    assert shares == [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11]]


def test_balanced_shares_evenly_when_all_the_mass_lies_on_full_devices():
    labels = np.array([0] * 2 + [1] * 4)
    generator = Scripted([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    shares = plain(dirichlet(labels, 3, alpha=0.1, min_samples=0, generator=generator, balanced=True))
    assert shares == [[0, 1], [2, 3], [4, 5]]


def test_a_small_alpha_gives_devices_few_classes_and_a_large_one_all():
    labels = np.repeat(np.arange(10), 500)
    skewed = dirichlet(labels, 20, alpha=0.01, min_samples=1, generator=seeded())
    even = dirichlet(labels, 20, alpha=1000.0, min_samples=1, generator=seeded())
    assert np.mean([len(np.unique(labels[share])) for share in skewed]) < 3
    assert all(len(np.unique(labels[share])) == 10 for share in even)
    assert all(200 < len(share) < 300 for share in even)


# Dirichlet, equal sizes


def test_equal_devices_draw_by_their_own_proportions_until_a_class_runs_out():
    labels = np.array([0] * 6 + [1] * 3)
    generator = Scripted([1.0, 0.0], [2 / 3, 1 / 3], [0.5, 0.5])
    shares = plain(dirichlet_equal(labels, 3, alpha=0.1, generator=generator))
    # The last device would draw evenly, and takes the one of class 0 and the two of class 1 that are left.
    assert shares == [[0, 1, 2], [3, 4, 6], [5, 7, 8]]


def test_an_equal_device_draws_by_its_proportions_of_the_classes_that_are_left():
    labels = np.array([0] * 4 + [1] * 3 + [2] * 5)
    generator = Scripted([1.0, 0.0, 0.0], [0.8, 0.15, 0.05], [0.0, 0.0, 1.0])
    shares = plain(dirichlet_equal(labels, 3, alpha=0.1, generator=generator))
    assert shares == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_the_last_sample_of_a_class_is_drawn_like_any_other():
    shares = dirichlet_equal(np.array([0, 1, 1, 1]), 2, alpha=0.1, generator=Scripted([0.5, 0.5], [0.5, 0.5]))
    assert plain(shares) == [[0, 1], [2, 3]]


def test_an_equal_device_whose_classes_are_all_gone_takes_from_what_is_left():
    labels = np.array([0, 0, 1, 1])
    shares = plain(dirichlet_equal(labels, 2, alpha=0.1, generator=Scripted([1.0, 0.0], [1.0, 0.0])))
    assert shares == [[0, 1], [2, 3]]


def test_the_first_of_equal_devices_hold_the_remainder():
    shares = dirichlet_equal(np.zeros(11, dtype=np.int64), 4, alpha=1.0, generator=seeded())
    assert [len(share) for share in shares] == [3, 3, 3, 2]


# Shards


def test_shards_are_cut_within_classes_and_dealt_out():
    labels = np.array([0, 1] * 6)
    shares = plain(shards(labels, 2, shards_per_device=2, generator=Scripted()))
    # Two shards of three per class, in order: the first device gets both of class 0.
    assert shares == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]


def test_a_shard_may_be_a_whole_class_and_a_single_sample():
    assert plain(shards(np.array([1, 0]), 2, shards_per_device=1, generator=Scripted())) == [[1], [0]]


def test_left_over_samples_go_to_the_first_shards_of_their_class():
    labels = np.array([0] * 5 + [1] * 4)
    shares = shards(labels, 2, shards_per_device=2, generator=Scripted())
    assert plain(shards(labels, 4, shards_per_device=1, generator=Scripted())) == [[0, 1, 2], [3, 4], [5, 6], [7, 8]]
    assert [len(share) for share in shares] == [5, 4]


def test_lower_labels_have_one_shard_more_where_they_do_not_divide_evenly():
    labels = np.array([0] * 4 + [1] * 4)
    assert plain(shards(labels, 3, shards_per_device=1, generator=Scripted())) == [[0, 1], [2, 3], [4, 5, 6, 7]]


def test_a_device_has_at_most_as_many_classes_as_shards():
    labels = seeded(1).permutation(np.repeat(np.arange(10), 100))
    shares = shards(labels, 50, shards_per_device=2, generator=seeded())
    assert max(len(np.unique(labels[share])) for share in shares) == 2
    assert {len(share) for share in shares} == {20}


def test_too_many_or_too_few_shards_are_refused_with_the_numbers():
    with pytest.raises(
        ConfigurationError, match=r"has 2 samples, too few for its 3 shards; .* data\.partition\.per_device"
    ):
        shards(np.array([0] * 9 + [1] * 2), 3, shards_per_device=2, generator=seeded())
    with pytest.raises(ConfigurationError, match="2 devices with 1 shards each make 2 shards, too few for 3 classes"):
        shards(np.array([0, 1, 2]), 2, shards_per_device=1, generator=seeded())
    with pytest.raises(ConfigurationError, match="shards_per_device is 0"):
        shards(np.array([0, 1]), 2, shards_per_device=0, generator=seeded())


# Natural ids and IID


def test_every_id_is_a_device_in_sorted_order():
    assert plain(by_id(np.array(["b", "a", "c", "a"]), 3)) == [[1, 3], [0], [2]]


def test_fewer_devices_share_neighbouring_ids():
    assert plain(by_id(np.array([5, 1, 4, 2, 3, 1]), 2)) == [[1, 3, 4, 5], [0, 2]]


def test_more_devices_than_ids_are_refused_with_the_numbers():
    with pytest.raises(ConfigurationError, match=r"3 devices .* 2 distinct ids; lower fleet.devices to 2"):
        by_id(np.array([1, 2, 1]), 3)


def test_iid_sizes_differ_by_one_at_most():
    shares = iid(11, 4, generator=seeded())
    assert [len(share) for share in shares] == [3, 3, 3, 2]
    assert sorted(np.concatenate(shares)) == list(range(11))


# What is refused everywhere


@pytest.mark.parametrize(
    "divide",
    [
        lambda labels, devices: dirichlet(labels, devices, alpha=0.1, min_samples=1, generator=seeded()),
        lambda labels, devices: dirichlet_equal(labels, devices, alpha=0.1, generator=seeded()),
        lambda labels, devices: shards(labels, devices, shards_per_device=1, generator=seeded()),
        lambda labels, devices: iid(len(labels), devices, generator=seeded()),
    ],
)
def test_more_devices_than_samples_are_refused_with_the_numbers(divide):
    with pytest.raises(ConfigurationError, match="4 devices are more than the 3 training samples"):
        divide(np.array([0, 1, 1]), 4)
    with pytest.raises(ConfigurationError, match="0 devices are asked for"):
        divide(np.array([0, 1, 1]), 0)


def test_a_minimum_that_cannot_be_met_is_refused_with_the_numbers():
    with pytest.raises(ConfigurationError, match="3 devices with at least 4 samples each need 12, but there are 10"):
        dirichlet(np.zeros(10, dtype=np.int64), 3, alpha=0.1, min_samples=4, generator=seeded())


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_an_alpha_that_is_not_positive_is_refused(alpha):
    with pytest.raises(ConfigurationError, match="alpha is"):
        dirichlet(np.zeros(10, dtype=np.int64), 3, alpha=alpha, min_samples=1, generator=seeded())
    with pytest.raises(ConfigurationError, match="alpha is"):
        dirichlet_equal(np.zeros(10, dtype=np.int64), 3, alpha=alpha, generator=seeded())


# Properties

labelled = st.integers(1, 6).flatmap(lambda classes: st.lists(st.integers(0, classes - 1), min_size=1, max_size=120))


@settings(max_examples=150)
@given(labelled, st.data())
def test_every_sample_goes_to_one_device_the_minimum_holds_and_a_seed_repeats(values, data):
    labels = np.array(values)
    devices = data.draw(st.integers(1, len(labels)))
    minimum = data.draw(st.integers(0, len(labels) // devices))
    alpha = data.draw(st.sampled_from([1e-3, 0.05, 0.1, 1.0, 100.0]))
    seed = data.draw(st.integers(0, 2**32 - 1))
    balanced = data.draw(st.booleans())
    divisions = {
        "dirichlet": lambda random: dirichlet(
            labels, devices, alpha=alpha, min_samples=minimum, generator=random, balanced=balanced
        ),
        "equal": lambda random: dirichlet_equal(labels, devices, alpha=alpha, generator=random),
        "iid": lambda random: iid(len(labels), devices, generator=random),
        "ids": lambda random: by_id(labels, min(devices, len(set(values)))),
    }
    for name, divide in divisions.items():
        shares = divide(seeded(seed))
        assert sorted(np.concatenate(shares)) == list(range(len(labels))), name
        assert all(share.dtype == np.int64 and (np.diff(share) > 0).all() for share in shares), name
        assert plain(shares) == plain(divide(seeded(seed))), name
        sizes = [len(share) for share in shares]
        if name == "dirichlet":
            assert min(sizes) >= minimum
        if name in ("equal", "iid"):
            assert max(sizes) - min(sizes) <= 1


def test_resampled_devices_have_different_samples_of_their_own_and_there_may_be_more_devices_than_samples():
    shares = resampled(12, 500, per_device=5, generator=seeded())
    assert len(shares) == 500
    assert all(len(np.unique(share)) == 5 and np.all(np.diff(share) > 0) for share in shares)
    assert {int(index) for share in shares for index in share} == set(range(12))
    assert [*resampled(3, 2, per_device=3, generator=seeded())[1]] == [0, 1, 2]
    with pytest.raises(ConfigurationError, match="4 samples, but there are 3"):
        resampled(3, 2, per_device=4, generator=seeded())
