"""Under the wall clock, the order of arrival decides an ask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedemu.coordinator.asks.ask import Action, Give, Tell, Terms
from fedemu.coordinator.asks.wall import WallAsk
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import Accepted, Cancel, Invalid, Late

ASK = AskId(3, 0, 0)
ONE, TWO, THREE = DeviceId(0), DeviceId(1), DeviceId(2)


def opened(count: int, wanted: int, deadline: float = 100.0) -> WallAsk:
    cohort = tuple(DeviceId(index) for index in range(count))
    machine = WallAsk(Terms(ASK, cohort, wanted, start=1000.0, deadline=deadline), cohort)
    assert machine.open(50.0) == [Give(device) for device in cohort]
    return machine


def test_the_first_to_arrive_are_accepted_and_the_others_cancelled() -> None:
    machine = opened(3, 2)
    assert machine.result(THREE, 60.0) == [Tell(THREE, Accepted(ask=str(ASK)))]
    assert machine.result(ONE, 70.0) == [Tell(ONE, Accepted(ask=str(ASK))), Tell(TWO, Cancel(ask=str(ASK)))]
    assert machine.verdicts == {0: "accepted", 1: "cancelled", 2: "accepted"}
    assert (machine.end, machine.accepted) == (1020.0, (0, 2))
    assert machine.tick(80.0) == machine.left(ONE, 80.0) == []
    assert machine.end == 1020.0
    machine.check()


def test_a_device_that_has_not_answered_at_the_deadline_is_late() -> None:
    machine = opened(2, 2)
    machine.result(ONE, 60.0)
    assert machine.tick(149.9) == []
    assert machine.tick(150.0) == [Tell(TWO, Late(ask=str(ASK)))]
    assert (machine.verdicts, machine.end) == ({0: "accepted", 1: "late"}, 1100.0)
    machine.check()


def test_a_result_after_the_deadline_is_late_even_if_no_timer_has_noticed() -> None:
    machine = opened(2, 2)
    late = Late(ask=str(ASK))
    assert machine.result(ONE, 150.0) == [Tell(ONE, late), Tell(TWO, late)]
    assert machine.verdicts == {0: "late", 1: "late"}
    machine.check()


@pytest.mark.parametrize(
    "happens",
    [
        lambda machine, now: machine.left(ONE, now, "crash"),
        lambda machine, now: machine.failed(ONE, now),
        lambda machine, now: machine.rejected(ONE, "nonfinite", "", now),
    ],
    ids=["it goes away", "it fails", "its reply cannot be used"],
)
def test_a_device_is_late_whatever_happens_to_it_after_the_deadline(
    happens: Callable[[WallAsk, float], list[Action]],
) -> None:
    machine = opened(2, 2)
    machine.result(TWO, 149.9)
    assert happens(machine, 150.2) == [Tell(ONE, Late(ask=str(ASK)))]
    assert (machine.verdicts, machine.causes) == ({0: "late", 1: "accepted"}, {})
    assert machine.end == 1100.0, "an ask ends at its deadline at the latest"
    machine.check()


def test_a_device_that_disconnects_has_dropped_out_and_its_return_changes_nothing() -> None:
    machine = opened(2, 1)
    machine.left(ONE, 60.0)
    assert machine.causes == {}, "nobody knows why"
    assert machine.joined(ONE, 61.0) == []
    assert not machine.expects(ONE)
    machine.result(TWO, 62.0)
    assert machine.verdicts == {0: "dropped", 1: "accepted"}


def test_an_ask_ends_early_when_nobody_is_left() -> None:
    machine = opened(3, 3)
    assert machine.left(ONE, 60.0, "crash") == []
    assert machine.failed(TWO, 61.0) == []
    invalid = Invalid(ask=str(ASK), reason="norm", detail="its norm is 9")
    assert machine.rejected(THREE, "norm", "its norm is 9", 62.0) == [Tell(THREE, invalid)]
    assert machine.verdicts == {0: "dropped", 1: "failed", 2: "rejected"}
    assert machine.causes == {0: "crash"}
    assert machine.end == 1012.0
    machine.check()


def test_a_device_that_was_not_connected_when_asked_has_dropped_out() -> None:
    machine = WallAsk(Terms(ASK, (ONE, TWO), 2, start=0.0, deadline=9.0), [TWO])
    assert machine.open(0.0) == [Give(TWO)]
    assert machine.verdicts == {0: "dropped"}


events = st.lists(
    st.tuples(st.sampled_from(["result", "rejected", "failed", "left", "joined", "tick"]), st.integers(0, 5)),
    max_size=40,
)


@given(events, st.integers(1, 7))
def test_every_device_has_exactly_one_outcome_whatever_happens(events: list[tuple[str, int]], wanted: int) -> None:
    machine = opened(6, wanted, deadline=30.0)
    first: dict[int, str] = {}
    for now, (kind, index) in enumerate(events):
        device = DeviceId(index)
        if kind == "tick":
            machine.tick(50.0 + now)
        elif kind in ("result", "rejected"):
            if machine.expects(device):
                machine.result(device, 50.0 + now) if kind == "result" else machine.rejected(
                    device, "norm", "", 50.0 + now
                )
        else:
            getattr(machine, kind)(device, 50.0 + now)
        machine.check()
        assert first.items() <= machine.verdicts.items()
        first = dict(machine.verdicts)
    machine.tick(80.0)
    assert machine.end is not None
    machine.check()
