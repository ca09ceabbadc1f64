"""A cohort is a function of the seed, the ask and the eligible devices."""

from __future__ import annotations

import pytest

from fedemu.coordinator.fleet.sampling import draw_cohort
from fedemu.coordinator.settings import ceil_share
from fedemu.protocol.ids import AskId, DeviceId

FLEET = [DeviceId(index) for index in range(50)]


def test_a_cohort_is_drawn_without_replacement_and_in_index_order() -> None:
    cohort = draw_cohort(FLEET, 20, seed=1, ask=AskId(1, 0, 0))
    assert len(set(cohort)) == 20
    assert list(cohort) == sorted(cohort)
    assert cohort == draw_cohort(FLEET, 20, seed=1, ask=AskId(1, 0, 0))


@pytest.mark.parametrize(
    "other", [{"seed": 2}, {"ask": AskId(2, 0, 0)}, {"ask": AskId(1, 1, 0)}, {"ask": AskId(1, 0, 1)}]
)
def test_every_seed_round_attempt_and_place_draws_anew(other: dict[str, object]) -> None:
    known: dict[str, object] = {"seed": 1, "ask": AskId(1, 0, 0)}
    assert draw_cohort(FLEET, 20, **known) != draw_cohort(FLEET, 20, **(known | other))  # type: ignore[arg-type]


def test_all_devices_are_asked_if_there_are_no_more_than_wanted() -> None:
    assert draw_cohort(FLEET[:3], 3, seed=1, ask=AskId(1, 0, 0)) == (0, 1, 2)
    assert draw_cohort([], 3, seed=1, ask=AskId(1, 0, 0)) == ()


def test_everyone_is_drawn_equally_often() -> None:
    drawn = [device for round in range(400) for device in draw_cohort(FLEET[:4], 2, seed=1, ask=AskId(round, 0, 0))]
    counts = [drawn.count(device) for device in FLEET[:4]]
    assert all(160 < count < 240 for count in counts), counts


@pytest.mark.parametrize(
    ("share", "count", "whole"), [(1.3, 30, 39), (1.1, 30, 33), (0.5, 5, 3), (1.0, 7, 7), (0.01, 3, 1)]
)
def test_shares_are_rounded_up_but_not_by_rounding_errors(share: float, count: int, whole: int) -> None:
    assert ceil_share(share, count) == whole
