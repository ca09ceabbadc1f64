"""The advice after too few replies fits what happened to the devices."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
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
            lost(outcomes={"failed": 12, "late": 1}, given_up=12),
            "12 of 13 devices that were asked (all tries) had no connection, or were silent, for 60 s (fleet.give_up)",
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
        (lost(4, outcomes={"late": 4}), "at most 4 devices were there to be asked; make [availability] last longer"),
        (lost(5, outcomes={"late": 5}), "all devices that were asked were late; lengthen fleet.deadline"),
        (lost(1, outcomes={"failed": 1}, given_up=1), "all devices that were asked had no connection"),
        (
            lost(3, outcomes={"failed": 2, "late": 1}, failures={"x": 2}),
            "2 of 3 devices that were asked (all tries) failed, for one reason: x",
        ),
        (lost(outcomes={"accepted": 13}), "ask more devices, lengthen fleet.deadline, or lower fleet.quorum"),
    ],
)
def test_the_advice_names_what_most_devices_were_lost_by(shortfall: Shortfall, advice: str) -> None:
    assert shortfall.advice(SETTINGS).startswith(advice)


def test_the_settings_to_change_are_told_with_their_values() -> None:
    late = lost(outcomes={"late": 13}).advice(SETTINGS)
    assert late.endswith("or make the devices of [profile] faster (in a new run: a resumed one keeps its settings)")
    assert "were late; lengthen fleet.deadline = 120, or" in late
    assert "fleet.over_selection = 1.3" in lost(outcomes={"dropped": 13}).advice(SETTINGS)


def test_an_accident_is_not_blamed_on_settings_of_the_experiment() -> None:
    for accident in (
        lost(0),
        lost(outcomes={"failed": 13}, given_up=13),
        lost(outcomes={"failed": 13}, failures={FULL: 13}),
        lost(outcomes={"rejected": 13}, rejections={"shape": 13}),
    ):
        assert "in a new run" not in accident.advice(SETTINGS)


def test_all_tries_of_a_round_count() -> None:
    shortfall = lost(outcomes={"late": 3, "dropped": 2})
    shortfall.add(lost(outcomes={"dropped": 4}, failures={"x": 1}))
    assert shortfall.advice(SETTINGS).startswith("6 of 9 devices that were asked (all tries) dropped out")
    assert shortfall.failures == {"x": 1}
    total = Shortfall()
    total.add(Shortfall(7, 9, Counter(late=9), 1, Counter(x=1), Counter(norm=2)))
    total.add(Shortfall(6, 8, Counter(late=8), 3, Counter(x=1), Counter(norm=1)))
    assert total == Shortfall(6, 9, Counter(late=17), 4, Counter(x=2), Counter(norm=3))


def test_the_reason_that_is_told_of_a_round_is_that_of_most_devices_if_they_failed() -> None:
    assert lost(outcomes={"failed": 4, "late": 3}, failures={"x": 1, FULL: 3}).failure == FULL
    assert lost(outcomes={"failed": 1, "late": 3}, failures={"x": 1}).failure is None


def test_the_shortfall_of_an_ask_is_read_from_its_end() -> None:
    terms = SimpleNamespace(cohort=(1, 2, 3, 4))
    machine = SimpleNamespace(
        terms=terms, verdicts={1: "failed", 2: "failed", 3: "rejected", 4: "late"}, given_up={2: "missed"}
    )
    exchange: Any = SimpleNamespace(machine=machine, failures=Counter(x=1), rejections=Counter(norm=1), forgotten=1)
    outcomes = Counter(failed=2, rejected=1, late=1)
    assert Shortfall.of(exchange, 3) == Shortfall(3, 4, outcomes, 1, Counter(x=1), Counter(norm=1), 1)


@pytest.mark.parametrize(("needed", "diverged"), [(6, True), (7, False)])
def test_a_try_has_diverged_if_enough_replies_came_with_those_that_exploded(needed: int, diverged: bool) -> None:
    outcomes = Counter(accepted=3, rejected=4, late=5)
    tried = Shortfall(needed, 12, outcomes, rejections=Counter(nonfinite=1, norm=2, shape=1))
    assert (tried.accepted, tried.exploded, tried.diverged) == (3, 3, diverged)
