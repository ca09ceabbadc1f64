"""Words for messages that have no setting of their own."""

from __future__ import annotations

import errno
import signal

import pytest

from fedemu.protocol.wording import ending, shortage


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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "no memory is left; free some"),
        (
            OSError(errno.ENFILE, "Too many open files in system"),
            "the limit of open files is reached; raise it (ulimit -n)",
        ),
        (
            RuntimeError("can't start new thread"),
            "the limit of processes is reached; raise it (ulimit -u, or pids.max of the container)",
        ),
        (RuntimeError("another one"), ""),
        (OSError(errno.EACCES, "Permission denied"), ""),
    ],
)
def test_what_a_machine_lacks_is_told_in_words(error: Exception, words: str) -> None:
    assert shortage(error) == words
