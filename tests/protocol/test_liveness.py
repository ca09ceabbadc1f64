"""When a peer counts as silent."""

from __future__ import annotations

import pytest

from fedemu.protocol.liveness import Liveness


def test_a_peer_expires_after_interval_times_patience_and_is_named_once() -> None:
    liveness = Liveness[str](interval=2.0, patience=3)
    liveness.heard("a", 10.0)
    assert liveness.expired(15.9) == []
    assert liveness.expired(16.0) == ["a"]
    assert liveness.expired(100.0) == []


def test_anything_heard_puts_the_deadline_off() -> None:
    liveness = Liveness[str](interval=1.0, patience=2)
    liveness.heard("a", 0.0)
    liveness.heard("b", 1.0)
    liveness.heard("a", 1.5)
    assert liveness.expired(2.9) == []
    assert liveness.expired(3.4) == ["b"]
    assert liveness.expired(3.5) == ["a"]


def test_the_longest_silent_peer_comes_first() -> None:
    liveness = Liveness[int](interval=1.0, patience=1)
    for peer, now in ((3, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)):
        liveness.heard(peer, now)
    assert liveness.expired(5.0) == [1, 2, 3]


def test_peers_are_quiet_after_half_the_time() -> None:
    liveness = Liveness[str](interval=2.0, patience=5)
    liveness.heard("a", 0.0)
    liveness.heard("b", 1.0)
    assert liveness.quiet(4.9) == []
    assert liveness.quiet(5.9) == ["a"]
    assert liveness.quiet(6.0) == ["a", "b"]
    liveness.heard("a", 6.0)
    assert liveness.quiet(6.0) == ["b"]


def test_a_forgotten_peer_never_expires() -> None:
    liveness = Liveness[str](interval=1.0, patience=1)
    liveness.heard("a", 0.0)
    liveness.forget("a")
    liveness.forget("never heard")
    assert liveness.expired(9.0) == []
    assert "a" not in liveness


def test_a_peer_may_return_after_it_expired() -> None:
    liveness = Liveness[str](interval=1.0, patience=1)
    liveness.heard("a", 0.0)
    assert liveness.expired(1.0) == ["a"]
    assert "a" not in liveness
    liveness.heard("a", 2.0)
    assert "a" in liveness
    assert liveness.expired(3.0) == ["a"]


@pytest.mark.parametrize(("interval", "patience"), [(0.0, 1), (-1.0, 1), (1.0, 0)])
def test_a_timeout_of_0_is_refused(interval: float, patience: int) -> None:
    with pytest.raises(ValueError, match=str(interval)):
        Liveness[str](interval, patience)
