"""Which lives of a machine begin when its devices are asked, and with which incarnations."""

from __future__ import annotations

import pytest

from fedemu.device.machine.processes import BIRTH_STRIDE
from fedemu.device.machine.sleepers import Sleepers

FIRST = 1 << 20


@pytest.fixture
def sleepers() -> Sleepers:
    return Sleepers([(0, 3), (10, 12)], FIRST)


def test_a_device_wakes_once_however_often_it_is_asked(sleepers: Sleepers) -> None:
    assert len(sleepers) == 5
    assert sleepers.wake([2, 10]) == [(2, FIRST + BIRTH_STRIDE), (10, FIRST + BIRTH_STRIDE)]
    assert sleepers.wake([2, 10]) == []
    assert sleepers.joined == 0


def test_devices_of_other_machines_are_not_woken(sleepers: Sleepers) -> None:
    assert sleepers.wake([3, 9, 12, 2**30]) == []


def test_each_life_has_higher_incarnations_than_all_before_it(sleepers: Sleepers) -> None:
    [(_, first)] = sleepers.wake([1])
    sleepers.has_joined(1, first + 40)
    assert sleepers.joined == 1
    assert sleepers.asleep(1, first + 40) == []
    [(_, second)] = sleepers.wake([1])
    assert second > first + 40


def test_a_device_that_is_asked_while_it_falls_asleep_wakes_again(sleepers: Sleepers) -> None:
    [(_, first)] = sleepers.wake([1])
    sleepers.has_joined(1, first)
    assert sleepers.wake([1]) == []
    assert [device for device, _ in sleepers.asleep(1, first)] == [1]
    assert sleepers.asleep(1, first + BIRTH_STRIDE) == [], "it was asked once"


def test_a_wake_that_came_again_before_the_device_joined_is_no_second_one(sleepers: Sleepers) -> None:
    [(_, first)] = sleepers.wake([1])
    sleepers.wake([1])
    sleepers.has_joined(1, first)
    assert sleepers.asleep(1, first) == []


def test_a_device_whose_process_died_can_be_woken(sleepers: Sleepers) -> None:
    [(_, first)] = sleepers.wake([1])
    sleepers.has_joined(1, first + 5)
    assert sleepers.incarnation(1) == first + 5
    sleepers.wake([1])
    sleepers.died(1)
    sleepers.has_joined(1, first + 5)
    assert sleepers.joined == 0, "the word of it came after its end"
    second = first + 5 + BIRTH_STRIDE
    assert sleepers.wake([1]) == [(1, second)]
    sleepers.has_joined(1, second)
    assert sleepers.asleep(1, second) == [], "what was asked of its last life has become of this one"
