"""Faults of the in-memory transport, drawn from a seed and delivered by an injected clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from fedemu.protocol.codec import DOWN, UP
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.messages import Hello, Stop
from fedemu.protocol.transport.interface import BOUNDLESS
from fedemu.protocol.transport.link import Faults
from fedemu.protocol.transport.memory import MemoryDealer, MemoryNetwork, MemoryRouter


class Clock:
    """Timers that fire when the test says so: by time, and at the same time in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def call_later(self, delay: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + delay, next(self._count), callback))

    def run(self, until: float = float("inf")) -> None:
        while self._timers and self._timers[0][0] <= until:
            self.now, _, callback = heapq.heappop(self._timers)
            callback()
        self.now = max(self.now, min(until, 1e9))


def pair(faults: Faults, seed: int = 0) -> tuple[Clock, MemoryDealer, list[tuple[int, float]]]:
    """A dealer, and what its router receives: device numbers with the times of arrival."""
    clock = Clock()
    network = MemoryNetwork(faults, seed, clock.call_later)
    seen: list[tuple[int, float]] = []
    router = network.bind(
        "here", UP, lambda _, envelope: seen.append((envelope.message.device, clock.now)), lambda peer, error: None
    )
    assert isinstance(router, MemoryRouter)
    return clock, network.connect(router.address, DOWN, lambda envelope: None, lambda error: None), seen


def arrivals(faults: Faults, seed: int = 0, count: int = 200) -> list[int]:
    clock, dealer, seen = pair(faults, seed)
    for device in range(count):
        assert dealer.send(Hello(device=device, incarnation=0, lease=""))
    clock.run()
    return [device for device, _ in seen]


def test_without_faults_everything_arrives_once_in_order() -> None:
    assert arrivals(Faults()) == list(range(200))


def test_loss_drops_its_share() -> None:
    assert arrivals(Faults(loss=1.0)) == []
    arrived = arrivals(Faults(loss=0.3))
    assert 110 < len(arrived) < 170
    assert arrived == sorted(set(arrived))


def test_duplication_delivers_twice() -> None:
    assert arrivals(Faults(duplication=1.0), count=3) == [0, 0, 1, 1, 2, 2]
    assert 230 < len(arrivals(Faults(duplication=0.3))) < 290


def test_reordering_changes_the_order_and_nothing_else() -> None:
    arrived = arrivals(Faults(reordering=0.2))
    assert sorted(arrived) == list(range(200))
    assert 20 < sum(before > after for before, after in itertools.pairwise(arrived)) < 60, "about 40 have overtaken"


def test_a_delay_is_bounded_and_keeps_the_order() -> None:
    clock, dealer, seen = pair(Faults(delay_seconds=2.0))
    for device in range(100):
        dealer.send(Hello(device=device, incarnation=0, lease=""))
    clock.run(until=1.0)
    assert 20 < len(seen) < 80
    clock.run(until=2.0)
    assert [device for device, _ in seen] == list(range(100))


def test_the_seed_decides_which_messages_suffer() -> None:
    faults = Faults(loss=0.2, duplication=0.2, reordering=0.2, delay_seconds=1.0)
    assert arrivals(faults, seed=1) == arrivals(faults, seed=1)
    assert arrivals(faults, seed=1) != arrivals(faults, seed=2)


def test_a_message_on_its_way_to_a_closed_router_is_lost() -> None:
    clock = Clock()
    network = MemoryNetwork(Faults(delay_seconds=1.0), call_later=clock.call_later)
    seen: list[int] = []

    def bind() -> MemoryRouter:
        return network.bind("here", UP, lambda _, envelope: seen.append(envelope.message.device), lambda *_: None)

    first = bind()
    dealer = network.connect("here", DOWN, lambda envelope: None, lambda error: None)
    dealer.send(Hello(device=1, incarnation=0, lease=""))
    first.close()
    dealer.send(Hello(device=2, incarnation=0, lease=""))
    bind()
    clock.run()
    assert seen == [2]


def test_a_message_for_which_a_connection_has_no_room_is_refused() -> None:
    network = MemoryNetwork(call_later=Clock().call_later, most_under_way=2)
    dealer = network.connect("here", DOWN, lambda envelope: None, lambda error: None)
    assert [dealer.send(Hello(device=device, incarnation=0, lease="")) for device in range(3)] == [True, True, False]


@pytest.mark.parametrize("faults", [Faults(), Faults(delay_seconds=2.0)])
def test_a_router_hears_that_a_connection_is_gone_after_what_was_said_on_it(faults: Faults) -> None:
    clock = Clock()
    network = MemoryNetwork(faults, call_later=clock.call_later)
    heard: list[object] = []
    router = network.bind(
        "here", UP, lambda _, envelope: heard.append(envelope.message.device), lambda *_: None,
        bounds=replace(BOUNDLESS, closed=heard.append),
    )  # fmt: skip
    dealer, other = (network.connect("here", DOWN, lambda envelope: None, lambda error: None) for _ in range(2))
    closed, cut = router.dealers
    for device in range(3):
        dealer.send(Hello(device=device, incarnation=0, lease=""))
    dealer.close()
    clock.run()
    assert heard == [0, 1, 2, closed]
    router.cut(cut)
    other.send(Hello(device=3, incarnation=0, lease=""))
    clock.run()
    assert sorted(map(str, heard[4:])) == ["3", str(cut)], "it is another connection on which it comes back"


def test_what_is_under_way_to_a_peer_that_is_cut_comes_once_and_the_new_peer_has_its_own_messages() -> None:
    clock, got = Clock(), list[str]()
    network = MemoryNetwork(Faults(delay_seconds=1.0), call_later=clock.call_later)
    router = network.bind("here", UP, lambda *_: None, lambda *_: None)
    network.connect("here", DOWN, lambda envelope: got.append(envelope.message.reason), lambda error: None)
    (old,) = router.dealers
    for number in range(3):
        router.send(old, Stop(reason=str(number)))
    router.cut(old)
    assert not router.send(old, Stop())
    (new,) = router.dealers
    router.send(new, Stop(reason="new"))
    clock.run()
    assert sorted(got) == ["0", "1", "2", "new"]


@pytest.mark.parametrize("fault", [{"loss": 1.5}, {"duplication": -0.1}, {"delay_seconds": float("inf")}])
def test_a_fault_out_of_range_is_refused(fault: dict[str, float]) -> None:
    (name, value), *_ = fault.items()
    with pytest.raises(ConfigurationError, match=f"{name} = {value} is out of range"):
        Faults(**fault)
