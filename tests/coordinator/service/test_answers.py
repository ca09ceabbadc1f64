"""The coordinator remembers the outcomes of recent asks and its refusals, in bounded memory."""

from __future__ import annotations

import pytest

from fedemu.coordinator.service import answers
from fedemu.coordinator.service.answers import BURST, RECENT_ASKS, REFUSED_PEERS, Refusals, Verdicts
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Duplicate, Late


def test_a_decided_contribution_is_answered_with_its_verdict_and_an_unknown_one_is_late() -> None:
    verdicts = Verdicts()
    verdicts.remember(AskId(1, 0, 0), {DeviceId(3): "accepted"})
    assert verdicts.answer("1.0.0", DeviceId(3)) == Duplicate(ask="1.0.0", verdict="accepted")
    assert verdicts.answer("1.0.0", DeviceId(4)) == Late(ask="1.0.0")
    assert verdicts.answer("9.0.0", DeviceId(3)) == Late(ask="9.0.0")


def test_only_recent_asks_are_remembered() -> None:
    verdicts = Verdicts()
    for round in range(RECENT_ASKS + 1):
        verdicts.remember(AskId(round, 0, 0), {DeviceId(0): "rejected"})
    assert verdicts.answer("0.0.0", DeviceId(0)) == Late(ask="0.0.0")
    assert verdicts.answer("1.0.0", DeviceId(0)) == Duplicate(ask="1.0.0", verdict="rejected")


def test_of_large_asks_fewer_are_remembered_but_always_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "RECENT_OUTCOMES", 5)
    verdicts, device = Verdicts(), DeviceId(0)
    for round, devices in enumerate([2, 2, 3, 9]):
        verdicts.remember(AskId(round, 0, 0), {DeviceId(each): "accepted" for each in range(devices)})
        kept = [ask for ask in range(4) if isinstance(verdicts.answer(f"{ask}.0.0", device), Duplicate)]
        assert kept == [[0], [0, 1], [1, 2], [3]][round]


def test_a_peer_that_is_refused_all_the_time_is_answered_once_a_second() -> None:
    refusals = Refusals()
    assert sum(refusals.allow(b"a", "malformed", 0.0) for _ in range(100)) == BURST
    assert refusals.allow(b"b", "malformed", 0.0)
    assert sum(refusals.allow(b"a", "malformed", 10 + tenth / 10) for tenth in range(101)) == BURST + 10


def test_refusals_take_bounded_memory() -> None:
    refusals = Refusals()
    for number in range(REFUSED_PEERS + 10):
        refusals.allow(number.to_bytes(4, "big"), "fleet_full", 0.0)
    assert len(refusals.idle) == REFUSED_PEERS
    refusals.forget((REFUSED_PEERS + 9).to_bytes(4, "big"))
    assert len(refusals.idle) == REFUSED_PEERS - 1
