"""Words for messages that have no setting of their own."""

from __future__ import annotations

import signal

import pytest

from fedemu.protocol.wording import counted, ending


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "ended with code 0"),
        (3, "ended with code 3"),
        (-signal.SIGTERM, "was ended by SIGTERM"),
        (-signal.SIGKILL, "was ended by SIGKILL (the kernel does so if memory runs out)"),
        (-50, "was ended by signal 50"),  # one of those without a name
    ],
)
def test_the_end_of_a_process_is_told_in_words(code: int, words: str) -> None:
    assert ending(code) == words


def test_a_number_has_its_noun_in_the_right_form() -> None:
    assert [counted(1, "round"), counted(0, "round"), counted(1200, "device")] == [
        "1 round",
        "0 rounds",
        "1,200 devices",
    ]
