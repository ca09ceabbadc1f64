"""Planned faults: how often they happen, and that seed, device and ask decide them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedemu.device.behaviour.faults import FaultPlan, FaultRates, plan
from fedemu.device.behaviour.profile import Fixed, Uniform
from fedemu.protocol.ids import AskId
from fedemu.protocol.seeds import generator


def test_without_rates_nothing_is_planned() -> None:
    assert plan(FaultRates(), 1, 2, AskId(3, 0, 0)) == FaultPlan()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("device", [1, 2])
@pytest.mark.parametrize("ask", [AskId(1, 0, 0), AskId(1, 1, 0), AskId(1, 0, 1), AskId(2, 0, 0)])
def test_five_draws_of_seed_device_and_ask_are_the_plan(seed: int, device: int, ask: AskId) -> None:
    purpose = f"faults/{ask.attempt}/{ask.ordinal}"
    draws = generator(seed, round=ask.round, device=device, purpose=purpose).random(5)
    dropping = FaultRates(silence=1.0, corrupt=1.0, downtime=Uniform(1.0, 9.0))
    corruption = ("nan", "shape", "truncate")[int(3 * draws[3])]
    assert plan(dropping, seed, device, ask) == FaultPlan("silence", draws[1], 1 + 8 * draws[4], "corrupt", corruption)
    assert plan(replace(dropping, silence=0.0), seed, device, ask) == FaultPlan(reply="corrupt", corruption=corruption)


def test_a_fault_has_a_stretch_of_its_draw_that_is_as_long_as_its_rate() -> None:
    rates = FaultRates(crash=0.25, leave=0.125, silence=0.5, corrupt=0.125, duplicate=0.25, decline=0.5)
    drops = (*["crash"] * 2, "leave", *["silence"] * 4, None)
    replies = ("corrupt", *["duplicate"] * 2, *["decline"] * 4, "normal")
    for device in range(100):
        draws = generator(1, round=1, device=device, purpose="faults/0/0").random(3)
        found = plan(rates, 1, device, AskId(1, 0, 0))
        assert (found.drop, found.reply) == (drops[int(8 * draws[0])], replies[int(8 * draws[2])])
        assert (found.corruption is None) == (found.reply != "corrupt")


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
