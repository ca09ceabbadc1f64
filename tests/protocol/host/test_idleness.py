"""Processes that should compute and do not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fedemu.protocol.host.idleness import Idleness, Stuckness, facts_of, processor_seconds
from fedemu.protocol.host.kernel import name_process


def test_a_process_that_uses_no_processor_is_found_after_its_time_and_one_that_stays_is_found_again() -> None:
    """A process that a driver holds can't be killed. The log must not tell of it at each look."""
    used = {10: 5.0, 20: 7.0}
    watch, stuckness = Idleness(60.0, used.get), Stuckness(60.0)
    found, stuck = [], []
    for second in range(0, 131, 5):
        used[20] += 0.2
        found.append(watch.look({1: 10, 2: 20}, float(second)))
        stuck.append(stuckness.look({1: (10, 5), 2: (20, second)}, float(second)))
    assert found == stuck == [[]] * 12 + [[1]] + [[]] * 11 + [[1]] + [[]] * 2


def test_a_process_that_uses_less_than_a_hundredth_of_a_core_does_nothing() -> None:
    """One that waits for ever may wake up now and then, and look whether it still has to wait."""
    used = {10: 5.0, 20: 7.0}
    watch = Idleness(60.0, used.get)
    found = []
    for second in range(0, 61, 5):
        found.append(watch.look({1: 10, 2: 20}, float(second)))
        used[10] += 0.04
        used[20] += 0.06
    assert found == [[]] * 12 + [[1]]


def test_a_process_that_works_now_and_then_begins_anew() -> None:
    used = {10: 5.0}
    watch = Idleness(20.0, used.get)
    found = []
    for second in range(0, 100, 5):
        used[10] += 0.5 if second % 20 == 15 else 0.0
        found += watch.look({1: 10}, float(second))
    assert found == []


def test_a_pause_of_the_watcher_is_no_idleness_of_the_watched() -> None:
    watch = Idleness(60.0, {10: 5.0}.get)
    assert watch.look({1: 10}, 0.0) == []
    assert watch.look({1: 10}, 500.0) == []
    assert watch.look({1: 10}, 505.0) == []


def test_a_process_without_work_and_one_that_is_gone_are_not_watched() -> None:
    used: dict[int, float] = {10: 5.0}
    watch = Idleness(10.0, used.get)
    for second in range(0, 30, 5):
        assert watch.look({} if second == 10 else {1: 10, 2: 99}, float(second)) == ([1] if second == 25 else [])


def test_the_processor_time_is_that_of_the_kernel() -> None:
    before, began = processor_seconds(os.getpid()), time.process_time()
    while time.process_time() < began + 0.1:
        pass
    while time.process_time() < began + 0.2:
        os.stat("/proc/self/status")  # in the kernel, for most of the time
    after, ended = processor_seconds(os.getpid()), time.process_time()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(ended - began, abs=0.03)
    assert processor_seconds(2**22 + 1) is None


def test_a_process_may_have_any_name() -> None:
    former = Path("/proc/self/comm").read_text().strip()
    name_process("a) Z 1 (b")
    try:
        facts = facts_of("self")
    finally:
        name_process(former)
    assert (facts[0], int(facts[1])) == (b"R", os.getppid())


def test_a_process_that_finishes_nothing_is_found_however_much_it_computes() -> None:
    stuckness = Stuckness(30.0)
    times = (*range(0, 30, 5), 29.5, 30)
    looks = [stuckness.look({0: (100, 5), 1: (200, turn)}, now) for turn, now in enumerate(times)]
    assert looks == [[]] * 7 + [[0]]
    assert stuckness.look({0: (101, 5)}, 35.0) == [], "the process that took its place begins anew"


def test_time_for_which_nobody_looked_counts_as_ten_seconds_for_what_is_finished_too() -> None:
    stuckness = Stuckness(30.0)
    assert stuckness.look({0: (100, 5)}, 0.0) == []
    assert stuckness.look({0: (100, 5)}, 1000.0) == []
    assert stuckness.look({0: (100, 6)}, 1010.0) == []
