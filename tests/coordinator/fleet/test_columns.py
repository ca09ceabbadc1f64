"""What the coordinator keeps of each device: which own states are lost, and which a round that is tried again finds."""

from __future__ import annotations

from collections.abc import Iterable

from fedemu.coordinator.fleet.columns import Columns
from fedemu.protocol.ids import AskId, DeviceId

FIRST, SECOND = AskId(1, 0, 0), AskId(2, 0, 0)


def with_states(devices: Iterable[int]) -> Columns:
    columns = Columns(10)
    columns.states = {DeviceId(device): FIRST for device in devices}
    return columns


def test_own_states_of_a_range_are_forgotten_without_its_end_however_many_others_have_one() -> None:
    for others in ([], [0, 1, 7, 8, 9]):
        columns = with_states([2, 4, 6, *others])
        assert columns.forget_states(2, 6) == 2
        assert columns.states.keys() == {6, *others}
        assert columns.forget_states(2, 6) == 0


def test_a_round_that_is_tried_again_finds_the_own_states_of_its_beginning_without_those_that_were_lost() -> None:
    columns = with_states([2, 4, 6])
    columns.begin_round()
    columns.states[DeviceId(2)] = SECOND
    columns.states[DeviceId(5)] = SECOND
    assert columns.forget_states(4, 6) == 2
    columns.begin_again()
    assert columns.states == {2: FIRST, 6: FIRST}
