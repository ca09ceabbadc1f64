"""Which comings and goings events tell of, with a clock that the tests set."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedemu.coordinator.service import comings as module
from fedemu.coordinator.service.comings import PER_SECOND, Comings

AT_ONCE = 3


def test_somebody_who_comes_too_often_is_told_of_now_and_then_with_the_number_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", AT_ONCE)
    comings = Comings()
    assert [comings.comes(7, 7, 5.0) for _ in range(AT_ONCE)] == [{}] * AT_ONCE
    assert comings.goes(7)
    assert [comings.comes(7, 7, 5.0) for _ in range(3)] == [None] * 3
    assert not comings.goes(7)
    assert comings.comes(8, 8, 5.0) == {}
    assert comings.comes(7, 7, 5.0 + 1 / PER_SECOND) == {"untold": 3}
    assert comings.goes(7)
    assert not comings.goes(7)


def test_who_has_not_come_for_long_is_forgotten_unless_an_event_has_still_to_tell_of_comings(
    monkeypatch: pytest.MonkeyPatch, entries: Callable[[object], int]
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", AT_ONCE)
    monkeypatch.setattr(module, "LEAST_TALES", 4)
    comings = Comings()
    for _ in range(AT_ONCE + 2):
        comings.comes("often", "often", 0.0)
    for who in range(1000):
        now = 10.0 * who
        assert comings.comes(who, who, now) == {}
        assert comings.goes(who)
    assert entries(comings) < 20
    assert comings.comes("often", "often", now) == {"untold": 2}
