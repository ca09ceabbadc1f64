"""What happens where the system starts no further process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.wording import refusal


@contextmanager
def starting(refused: type[FedemuError] = ConfigurationError) -> Iterator[None]:
    """A process is started in this block. If the system refuses, that becomes one sentence that says what to do.

    It is an error of the class ``refused``.
    """
    try:
        yield
    except OSError as error:
        raise refused(f"no process can be started on this machine: {refusal(error)}") from error
