"""Starts the page of a run as a process of its own, beside the command that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.starting import starting

OUTPUT: Final = "page.out"
"""What the page's process prints goes into this file of the run's logs."""


def start_page(directory: Path) -> None:
    """Start the page of a run directory, and tell people its address and its token.

    It is served until this process has ended and nobody has watched for some seconds. Raises ConfigurationError if this
    machine can't serve it, and FedemuError if it does not start for another reason.
    """
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    readable, writable = os.pipe()
    with os.fdopen(readable, encoding="utf-8") as line:
        try:
            with (logs / OUTPUT).open("ab") as output, starting():
                subprocess.Popen(
                    [
                        *interpreter(),
                        "-m",
                        "fedemu.ops.live.serving",
                        str(os.getpid()),
                        str(writable),
                        str(directory.resolve()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=(writable,),
                    start_new_session=True,
                )
        finally:
            os.close(writable)
        told = line.read().splitlines()
    match told:
        case [address, token]:
            announce(address, token)
        case [reason]:
            raise ConfigurationError(reason)
        case _:  # the run's folder may be given back with its logs, so they are shown
            with suppress(OSError):
                sys.stderr.write((logs / OUTPUT).read_text(encoding="utf-8", errors="replace"))
            raise FedemuError("the page could not be served; the lines above say why")


def announce(address: str, token: str) -> None:
    """Tell people where the page is, and by which token its buttons work."""
    print(f"page   {address}#token={token}\ntoken  {token}   (for its buttons)", file=sys.stderr, flush=True)
