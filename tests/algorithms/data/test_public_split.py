"""Public data are drawn before devices get theirs."""

import numpy as np
import pytest

from fedemu.algorithms.data.public_split import PublicSplit, public_split
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
