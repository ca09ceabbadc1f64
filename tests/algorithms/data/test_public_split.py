"""Public data are drawn before devices get theirs."""

import numpy as np
import pytest

from fedemu.algorithms.data.public_split import PublicSplit, long_tail, public_split
from fedemu.protocol.errors import ConfigurationError


def split(samples: int, fraction: float, validation: float = 0.25, seed: int = 0, **more: object) -> PublicSplit:
    return public_split(
        samples,
        fraction=fraction,
        validation=validation,
        generator=np.random.default_rng(seed),
        **more,  # type: ignore[arg-type]
    )


def test_the_parts_are_disjoint_ascending_and_cover_everything() -> None:
    drawn = split(200, 0.1)
    assert (len(drawn.train), len(drawn.validation), len(drawn.rest)) == (15, 5, 180)
    assert sorted([*drawn.train, *drawn.validation, *drawn.rest]) == list(range(200))
    for part in (drawn.train, drawn.validation, drawn.rest):
        assert part.dtype == np.int64
        assert (np.diff(part) > 0).all()


def test_a_fortieth_of_fifty_thousand_is_938_to_train_on_and_312_for_validation() -> None:
    drawn = split(50_000, 0.025)
    assert (len(drawn.train), len(drawn.validation)) == (938, 312)


def test_a_whole_number_of_samples_for_validation_is_not_rounded_down() -> None:
    drawn = split(1000, 0.1, validation=0.29)  # as floats, 0.29 · 100 is below 29
    assert (len(drawn.train), len(drawn.validation)) == (71, 29)


def test_which_samples_are_public_follows_from_the_generator() -> None:
    assert split(100, 0.2, seed=3).train.tolist() == split(100, 0.2, seed=3).train.tolist()
    assert split(100, 0.2, seed=3).train.tolist() != split(100, 0.2, seed=4).train.tolist()


def test_whole_ids_become_public_with_all_their_samples() -> None:
    ids = np.array(list("dabcabcdab") * 10)
    drawn = split(100, 0.5, ids=ids)
    public = {*ids[drawn.train], *ids[drawn.validation]}
    assert len(public) == 2
    assert public.isdisjoint(ids[drawn.rest])


def test_at_least_one_id_becomes_public() -> None:
    ids = np.repeat(np.arange(50), 8)
    drawn = split(400, 0.001, ids=ids)
    assert (len(drawn.train), len(drawn.validation), len(drawn.rest)) == (6, 2, 392)


@pytest.mark.parametrize(
    ("fraction", "validation", "ids", "said"),
    [
        (0.001, 0.25, None, "takes 0 of 40 training samples, 0 to train on and 0 for validation; both need one"),
        (0.05, 0.25, None, "takes 2 of 40 training samples, 2 to train on and 0 for validation"),
        (0.999, 0.25, None, "takes 40 of 40 training samples, which leaves devices nothing; lower the fraction"),
        (0.1, 0.25, np.zeros(40), "takes 40 of 40 training samples, which leaves devices nothing; lower the fraction"),
    ],
)
def test_a_part_without_samples_is_refused(fraction: float, validation: float, ids: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        split(40, fraction, validation, ids=ids)


def test_the_numbers_of_a_long_tail_fall_by_the_same_factor_and_add_up() -> None:
    assert long_tail(700, 3, 4.0).tolist() == [400, 200, 100]
    assert long_tail(10, 1, 5.0).tolist() == [10]
    counts = long_tail(1710, 10, 10.0)
    assert counts.sum() == 1710
    assert counts[0] / counts[-1] == pytest.approx(10, rel=0.02)


def test_an_imbalance_draws_more_of_some_classes_and_the_generator_decides_of_which() -> None:
    labels = np.tile(np.arange(4), 250)
    frequent = set()
    for seed in range(8):
        drawn = split(1000, 0.15, seed=seed, labels=labels, imbalance=8.0)
        counts = np.bincount(labels[[*drawn.train, *drawn.validation]], minlength=4)
        assert sorted(counts) == [10, 20, 40, 80]
        assert sorted([*drawn.train, *drawn.validation, *drawn.rest]) == list(range(1000))
        frequent.add(int(counts.argmax()))
    assert len(frequent) > 1


def test_without_an_imbalance_labels_change_nothing() -> None:
    assert split(100, 0.2, labels=np.zeros(100, np.int64)).train.tolist() == split(100, 0.2).train.tolist()


def test_figure_12_of_flashback_trains_on_1283_unbalanced_samples() -> None:
    labels = np.tile(np.arange(10), 5000)
    assert len(split(50_000, 0.0342, labels=labels, imbalance=10.0).train) == 1283


def test_an_imbalance_that_the_data_cannot_give_is_refused() -> None:
    labels = np.tile(np.arange(4), 25)
    with pytest.raises(ConfigurationError, match=r"asks for \d+ public samples of class \d, which has 25"):
        split(100, 0.5, labels=labels, imbalance=20.0)
    with pytest.raises(ConfigurationError, match="a natural partition draws whole values"):
        split(100, 0.5, ids=labels, labels=labels, imbalance=2.0)
