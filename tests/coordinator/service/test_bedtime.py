"""Who is woken when an ask opens, who is woken again, and who is told to sleep: exactly, with a clock of the test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from fedemu.coordinator.fleet.planned_times import PlannedTimes
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.service import bedtime
from fedemu.coordinator.service.bedtime import Bedtime
from fedemu.coordinator.settings import Settings
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import Hello, Message, Sleep, Wake

NORTH, SOUTH = b"north", b"south"
AGAIN = 2.0


def asked(*cohort: int, settled: Iterable[int] = ()) -> Any:
    """An open ask of ``cohort``, of which the ``settled`` devices have their outcome."""
    open_ones = set(cohort) - set(settled)
    terms = SimpleNamespace(cohort=tuple(map(DeviceId, cohort)))
    return SimpleNamespace(machine=SimpleNamespace(terms=terms, pending=open_ones.__contains__))


@dataclass
class Night:
    """A fleet of eight devices that sleep, of which NORTH has the first five and SOUTH the others."""

    roster: Roster = field(init=False)
    sent: list[tuple[bytes, Message]] = field(default_factory=list)
    lease: dict[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = Settings(run="test", seed=1, rounds=1, devices=8, per_round=2)
        self.roster = Roster(settings, planned=PlannedTimes(8, None))
        for peer, count in ((NORTH, 5), (SOUTH, 3)):
            self.lease[peer] = self.roster.enroll(peer, count, None, "", 0.0).token
        self.bedtime = Bedtime(self.roster, lambda peer, message: self.sent.append((peer, message)), AGAIN)

    def joins(self, *devices: int) -> None:
        for device in devices:
            lease = self.lease[NORTH if device < 5 else SOUTH]
            self.roster.hello(b"%d" % device, Hello(device=device, incarnation=1, lease=lease), 0.0)

    def told(self) -> list[tuple[bytes, Message]]:
        """What was sent since the last call."""
        told, self.sent[:] = [*self.sent], []
        return told


@pytest.fixture
def night() -> Night:
    return Night()


def wakes(*devices: int) -> Wake:
    return Wake(devices=devices)


def test_an_ask_wakes_its_devices_by_one_message_to_each_machine(night: Night) -> None:
    night.bedtime.opened(asked(6, 1, 7, 4), 0.0)
    assert night.told() == [(SOUTH, wakes(6, 7)), (NORTH, wakes(1, 4))]


def test_devices_that_are_awake_or_have_their_outcome_are_not_woken(night: Night) -> None:
    night.joins(1)
    night.bedtime.opened(asked(1, 2, 3, settled=[3]), 0.0)
    assert night.told() == [(NORTH, wakes(2))]


def test_a_message_wakes_a_bounded_number_of_devices(night: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bedtime, "MOST_DEVICES", 2)
    night.bedtime.opened(asked(0, 1, 2, 3, 4), 0.0)
    assert night.told() == [(NORTH, wakes(0, 1)), (NORTH, wakes(2, 3)), (NORTH, wakes(4))]


def test_a_device_that_did_not_hear_that_it_is_to_sleep_is_told_again_until_it_leaves(night: Night) -> None:
    night.joins(1, 2)
    night.bedtime.look(None, (), 10.0)
    assert night.told() == [(b"1", Sleep()), (b"2", Sleep())]
    night.roster.leave(b"2", 10.5)
    night.bedtime.look(None, (), 10.0 + AGAIN - 0.01)
    assert night.told() == []
    night.bedtime.look(asked(1), (), 10.0 + AGAIN)
    assert night.told() == [(b"1", Sleep()), (NORTH, wakes(1))], "and is woken as soon as it sleeps"
    night.roster.leave(b"1", 12.5)
    night.bedtime.look(None, (), 10.0 + 2 * AGAIN)
    assert night.told() == []


def test_whoever_has_not_come_is_woken_again_after_the_interval_and_not_before(night: Night) -> None:
    exchange = asked(1, 2)
    night.bedtime.opened(exchange, 10.0)
    night.joins(1)
    night.told()
    night.bedtime.look(exchange, (), 10.0 + AGAIN - 0.01)
    assert night.told() == []
    night.bedtime.look(exchange, (), 10.0 + AGAIN)
    assert night.told() == [(NORTH, wakes(2))]
    night.bedtime.look(exchange, (), 10.0 + 2 * AGAIN - 0.01)
    assert night.told() == []


def test_a_machine_that_is_away_is_not_told_and_is_told_when_it_is_back(night: Night) -> None:
    exchange = asked(2)
    night.roster.leave(NORTH, 0.0)
    night.bedtime.opened(exchange, 0.0)
    assert night.told() == []
    night.roster.enroll(b"north again", 5, night.lease[NORTH], "", 1.0)
    night.bedtime.look(exchange, (), AGAIN)
    assert night.told() == [(b"north again", wakes(2))]


def test_a_machine_that_comes_has_one_device_woken_at_once_and_again_only_when_it_is_time(night: Night) -> None:
    night.bedtime.wake_heralds()
    assert night.told() == [(NORTH, wakes(0)), (SOUTH, wakes(5))]
    night.bedtime.wake_heralds()
    assert night.told() == []
    night.joins(5)
    night.bedtime.wake_heralds(again=True)
    assert night.told() == [(NORTH, wakes(0))], "the other one has woken a device"
    night.roster.leave(NORTH, 1.0)
    night.bedtime.wake_heralds()
    night.roster.enroll(b"north again", 5, night.lease[NORTH], "", 2.0)
    night.bedtime.wake_heralds()
    assert night.told() == [(b"north again", wakes(0))]


def test_a_device_sleeps_once_it_has_its_outcome_and_was_told_it(night: Night) -> None:
    night.joins(1, 2, 3)
    exchange = asked(1, 2, 3, settled=[2, 3])
    night.bedtime.opened(exchange, 0.0)
    night.bedtime.look(exchange, {DeviceId(3)}, 0.1)
    assert night.told() == [(b"2", Sleep())]
    assert sorted(night.roster.connected) == [1, 3]
    night.bedtime.look(exchange, (), 0.2)
    assert night.told() == [(b"3", Sleep())]


def test_between_two_asks_everybody_is_told_to_sleep(night: Night) -> None:
    night.joins(0, 6)
    night.bedtime.look(None, (), 0.0)
    assert sorted(night.told()) == [(b"0", Sleep()), (b"6", Sleep())]
