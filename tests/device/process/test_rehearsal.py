"""A rehearsal plays a whole life, and leaves nothing behind."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemu.device.process import rehearsal
from fedemu.device.process.birth import Birthplace
from fedemu.device.process.rehearsal import ASKS, play, rehearse

TOYS = Path(__file__).parents[1] / "toys.py"


@pytest.fixture
def birthplace(tmp_path: Path, toy_stream: Callable[[int], bytes]) -> Birthplace:
    (tmp_path / "experiment").write_bytes(b"{}")
    (tmp_path / "stream").write_bytes(toy_stream(3))
    return Birthplace.open(
        lease="lease",
        heartbeat_seconds=2.0,
        patience=5,
        behaviours=f"{TOYS}:open_behaviours",
        experiment=tmp_path / "experiment",
        stream=tmp_path / "stream",
        folder=tmp_path / "devices",
    )


def test_a_device_answers_every_ask_of_its_rehearsal_and_leaves_nothing(birthplace: Birthplace) -> None:
    open_before = os.listdir("/proc/self/fd")
    heard = Counter(type(message).__name__ for message in play(birthplace, 1))
    assert heard["Scheduled"] == heard["Result"] == ASKS
    assert heard["Hello"] == heard["Presence"] == heard["Bye"] == 1
    assert len(os.listdir("/proc/self/fd")) == len(open_before)
    assert not birthplace.folder.exists()


def test_a_rehearsal_that_fails_is_given_up(birthplace: Birthplace, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def fail(place: Birthplace, device: int) -> None:
        played.append(device)
        raise ValueError("cursed")

    monkeypatch.setattr(rehearsal, "play", fail)
    rehearse(birthplace)
    assert played == [0]
