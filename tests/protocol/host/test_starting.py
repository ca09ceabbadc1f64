"""A system that starts no process says why, and what to do."""

from __future__ import annotations

import errno

import pytest

from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.starting import starting


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EAGAIN, "the limit of processes is reached; raise it (ulimit -u, or pids.max of the container)"),
        (errno.ENOMEM, "no memory is left; free some"),
        (errno.EMFILE, "the limit of open files is reached; raise it (ulimit -n)"),
    ],
)
def test_a_refusal_of_the_system_becomes_a_sentence(number: int, said: str) -> None:
    with pytest.raises(ConfigurationError) as refused, starting():
        raise OSError(number, "")
    assert str(refused.value) == f"no process can be started on this machine: {said}"


def test_a_refusal_is_of_the_wanted_class() -> None:
    with pytest.raises(FedemuError) as refused, starting(FedemuError):
        raise OSError(errno.EAGAIN, "")
    assert refused.type is FedemuError
