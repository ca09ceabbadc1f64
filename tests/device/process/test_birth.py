"""What a life of a device leaves for the next one, and what a device begins with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.data.partition import Partition
from fedemu.algorithms.streams.periods import static
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.process import birth
from fedemu.device.process.birth import Birthplace
from fedemu.device.runtime.actions import Connect


@pytest.fixture
def place(tmp_path: Path) -> Birthplace:
    none: Any = np.zeros(3, np.int64)
    partition = Partition(np.array([0, 2, 5]), np.arange(5), none, np.empty(0, np.int64))
    stream = StreamPlan(static(partition, 1)[0])
    return Birthplace("lease", 2.0, 5, lambda device: None, stream, tmp_path)  # type: ignore[arg-type, return-value]


def test_an_absence_survives_all_lives_until_it_is_over(place: Birthplace, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(birth.time, "time", lambda: now)
    place.send_away(1, 30.0)
    now = 1010.0
    assert place.away(1) == 20.0
    now = 1015.0
    assert place.away(1) == 15.0
    now = 0.0
    assert place.away(1) == 30.0, "the clock was set back"


def test_an_absence_that_is_over_is_none(place: Birthplace, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(birth.time, "time", lambda: now)
    place.send_away(1, 30.0)
    now = 2000.0
    assert place.away(1) == 0.0


def test_no_absence_leaves_no_file(place: Birthplace, tmp_path: Path) -> None:
    place.send_away(1, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_an_absence_cut_off_by_the_crash_is_none(place: Birthplace, tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "away").write_text("17e")
    assert place.away(1) == 0.0


def test_a_device_begins_with_the_incarnation_that_it_is_given(place: Birthplace) -> None:
    runtime = place.runtime(1, 77)
    connect, hello = runtime.start(0.0)
    assert connect == Connect()
    assert hello.message.incarnation == 77  # type: ignore[union-attr]


def test_devices_that_live_again_in_a_process_keep_their_behaviours_and_their_number_is_bounded(
    toy_birthplace: Callable[[int], Birthplace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(birth, "KEPT_BEHAVIOURS", 2)
    place = toy_birthplace(3)
    first = place.behaviour(0)
    assert place.behaviour(0) is first
    assert place.behaviour(1) is not first
    place.behaviour(2)
    assert place.behaviour(0) is not first, "two others came since"
