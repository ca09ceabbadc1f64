"""Planned faults: how often they happen, and that seed, device and ask decide them."""

from __future__ import annotations

from collections import Counter
from statistics import fmean

import pytest

from fedemu.device.behaviour.faults import FaultPlan, FaultRates, plan
from fedemu.device.behaviour.profile import Fixed, Uniform
from fedemu.protocol.ids import AskId


def test_without_rates_nothing_is_planned() -> None:
    assert plan(FaultRates(), 1, 2, AskId(3, 0, 0)) == FaultPlan()


def test_a_plan_is_a_function_of_seed_device_and_ask() -> None:
    rates = FaultRates(crash=0.5, corrupt=0.5, downtime=Uniform(1.0, 9.0))
    plans = {
        (seed, device, ask): plan(rates, seed, device, ask)
        for seed in (1, 2)
        for device in (1, 2)
        for ask in (AskId(1, 0, 0), AskId(1, 1, 0), AskId(1, 0, 1), AskId(2, 0, 0))
    }
    assert all(plan(rates, *key) == found for key, found in plans.items())
    struck = [found for found in plans.values() if found.drop]
    assert len({found.fraction for found in struck}) == len({found.downtime for found in struck}) == len(struck) > 2


def test_faults_happen_at_their_rates() -> None:
    rates = FaultRates(0.2, 0.1, 0.05, corrupt=0.1, duplicate=0.2, decline=0.05, downtime=Uniform(0.0, 60.0))
    plans = [plan(rates, 1, device, AskId(1, 0, 0)) for device in range(6000)]
    drops = Counter(found.drop for found in plans)
    replies = Counter(found.reply for found in plans)
    assert drops["crash"] / 6000 == pytest.approx(0.2, abs=0.02)
    assert drops["leave"] / 6000 == pytest.approx(0.1, abs=0.02)
    assert drops["silence"] / 6000 == pytest.approx(0.05, abs=0.01)
    assert fmean(found.downtime for found in plans if found.drop) == pytest.approx(30.0, abs=2.0)
    assert replies["corrupt"] / 6000 == pytest.approx(0.1, abs=0.02)
    assert replies["duplicate"] / 6000 == pytest.approx(0.2, abs=0.02)
    assert replies["decline"] / 6000 == pytest.approx(0.05, abs=0.01)
    corruptions = Counter(found.corruption for found in plans if found.reply == "corrupt")
    assert set(corruptions) == {"nan", "shape", "truncate"}
    assert all(found.corruption is None for found in plans if found.reply != "corrupt")


def test_a_rate_of_one_always_causes_its_fault_and_no_other() -> None:
    plans = [plan(FaultRates(leave=1.0, downtime=Fixed(7.0)), 1, device, AskId(1, 0, 0)) for device in range(50)]
    assert {(found.drop, found.downtime, found.reply) for found in plans} == {("leave", 7.0, "normal")}
    assert all(0.0 <= found.fraction < 1.0 for found in plans)
    corrupt = FaultRates(corrupt=1.0, corruptions=("shape",))
    assert plan(corrupt, 1, 2, AskId(1, 0, 0)) == FaultPlan(reply="corrupt", corruption="shape")


def test_a_device_with_a_fault_at_a_low_rate_has_it_at_a_higher_rate() -> None:
    def struck(rate: float) -> set[int]:
        return {
            device for device in range(500) if plan(FaultRates(crash=rate), 1, device, AskId(1, 0, 0)).drop == "crash"
        }

    assert struck(0.05) < struck(0.2)
