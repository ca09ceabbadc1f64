"""The limit of open files is raised as far as it may be, and never lowered."""

from __future__ import annotations

import resource
from collections.abc import Callable

import pytest

from fedemu.protocol.host.open_files import UNLIMITED, allow_open_files, most_open_files, open_files


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[tuple[int, int]]]:
    """Play these limits. Returns what they are set to, one after another."""

    def play(soft: int, hard: int) -> list[tuple[int, int]]:
        held = [(soft, hard)]
        monkeypatch.setattr(resource, "getrlimit", lambda kind: held[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: held.append(pair))
        return held

    return play


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "holds"),
    [
        (1024, 4096, 2000, 2000),
        (1024, 4096, 9000, 4096),
        (3000, 4096, 2000, 3000),
        (1024, resource.RLIM_INFINITY, 9000, 9000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 9000, UNLIMITED),
    ],
)
def test_the_limit_is_raised_as_far_as_it_may_be(
    soft: int, hard: int, wanted: int, holds: int, limits: Callable[[int, int], list[tuple[int, int]]]
) -> None:
    held = limits(soft, hard)
    assert most_open_files() == (UNLIMITED if hard == resource.RLIM_INFINITY else hard)
    assert allow_open_files(wanted) == holds == open_files()
    assert held in ([(soft, hard)], [(soft, hard), (holds, hard)])


def test_a_real_process_gets_what_it_asks_for() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert allow_open_files(before[0] + 1) == min(before[0] + 1, most_open_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
