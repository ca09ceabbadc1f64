"""Starts the page of a run as a process of its own, beside the command that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.starting import starting

OUTPUT: Final = "page.out"
"""What the page's process prints goes into this file of the run's logs."""


def start_page(directory: Path) -> None:
    """Start the page of a run directory, and tell people its address and its token.

    It is served until this process has ended and nobody has watched for some seconds. Raises FedemuError if it does not
    start.
    """
    logs = directory / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    readable, writable = os.pipe()
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
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as line:
        told = line.read().splitlines()
    if len(told) != 2:
        with suppress(OSError):
            sys.stderr.write((logs / OUTPUT).read_text(encoding="utf-8", errors="replace"))
        raise FedemuError(f"The page could not be served; {logs / OUTPUT} says why.")
    announce(*told)


def announce(address: str, token: str) -> None:
    """Tell people where the page is, and by which token its buttons work."""
    print(f"page   {address}#token={token}\ntoken  {token}   (for its buttons)", file=sys.stderr, flush=True)
