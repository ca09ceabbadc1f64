"""The advice after too few replies fits what happened to the devices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fedemu.coordinator.rounds.shortfall import Shortfall
from fedemu.coordinator.settings import Settings

SETTINGS = Settings(run="test", seed=1, rounds=4, devices=20, per_round=10, deadline=120.0, give_up=60.0)


def lost(most_asked: int = 13, **more: Any) -> Shortfall:
    counts = {name: Counter(more.pop(name, {})) for name in ("outcomes", "failures", "rejections")}
    return Shortfall(5, most_asked, **counts, **more)


FULL = "own.safetensors cannot be written: the disk is full"


@pytest.mark.parametrize(
    ("shortfall", "advice"),
    [
        (lost(0), "no device was connected; start devices with fedemu device, and go on with --resume"),
        (
            lost(outcomes={"failed": 13}, given_up=13),
            "all devices that were asked had no connection, or were silent, for 60 s (fleet.give_up)",
        ),
        (lost(outcomes={"failed": 13}, failures={FULL: 13}), f"all devices failed, 13 times for one reason: {FULL}"),
        (
            lost(outcomes={"failed": 9, "dropped": 4}, failures={"loss is lost": 8, "other": 1}),
            "9 of 13 devices that were asked (all tries) failed, 8 of them for this reason: loss is lost",
        ),
        (
            lost(outcomes={"rejected": 10, "accepted": 3}, rejections={"shape": 7, "malformed": 3}),
            "10 of 13 devices that were asked (all tries) sent replies that were rejected, most often as 'shape' (7)",
        ),
        (
            lost(outcomes={"failed": 11, "accepted": 2}),
            "11 of 13 devices that were asked (all tries) declined or failed by plan",
        ),
        (
            lost(outcomes={"late": 12, "accepted": 1}),
            "12 of 13 devices that were asked (all tries) were late; lengthen fleet.de",
        ),
        (lost(outcomes={"dropped": 12, "late": 1}), "12 of 13 devices that were asked (all tries) dropped out"),
        (
            lost(3, outcomes={"accepted": 9}),
            "at most 3 devices were there to be asked; make [availability] last longer",
        ),
    ],
)
def test_the_advice_names_what_most_devices_were_lost_by(shortfall: Shortfall, advice: str) -> None:
    assert shortfall.advice(SETTINGS).startswith(advice)


def test_the_settings_to_change_are_told_with_their_values() -> None:
    late = lost(outcomes={"late": 13}).advice(SETTINGS)
    assert late.endswith("or make the devices of [profile] faster (in a new run: a resumed one keeps its settings)")
    assert "were late; lengthen fleet.deadline = 120, or" in late
    assert "fleet.over_selection = 1.3" in lost(outcomes={"dropped": 13}).advice(SETTINGS)


def test_all_tries_of_a_round_count() -> None:
    shortfall = lost(outcomes={"late": 3, "dropped": 2})
    shortfall.add(lost(outcomes={"dropped": 4}, failures={"x": 1}))
    assert shortfall.advice(SETTINGS).startswith("6 of 9 devices that were asked (all tries) dropped out")
    assert shortfall.failures == {"x": 1}
