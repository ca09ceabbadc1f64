"""A rehearsal plays a whole life, and leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from fedemu.device.process import rehearsal
from fedemu.device.process.birth import Birthplace
from fedemu.device.process.rehearsal import ASKS, play, rehearse


@pytest.fixture
def birthplace(toy_birthplace: Callable[[int], Birthplace]) -> Birthplace:
    return toy_birthplace(3)


def test_a_device_answers_every_ask_of_its_rehearsal_and_leaves_nothing(
    birthplace: Birthplace, descriptors: Callable[[], set[str]]
) -> None:
    before = descriptors()
    heard = Counter(type(message).__name__ for message in play(birthplace, 1))
    assert heard["Scheduled"] == heard["Result"] == ASKS
    assert heard["Hello"] == heard["Presence"] == heard["Bye"] == 1
    assert not descriptors() - before
    assert not birthplace.folder.exists()


def test_a_rehearsal_that_fails_is_given_up(birthplace: Birthplace, monkeypatch: pytest.MonkeyPatch) -> None:
    played = []

    def fail(place: Birthplace, device: int) -> None:
        played.append(device)
        raise ValueError("cursed")

    monkeypatch.setattr(rehearsal, "play", fail)
    rehearse(birthplace)
    assert played == [0]
