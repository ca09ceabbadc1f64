"""Plays the blocks of a page in order, as a reader would: in one folder, one shell and one Python session."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from pages import Block, Page
from warm import DONE, MOST_ROUNDS

CHEAP = {
    "FEDEMU_ROUNDS": str(MOST_ROUNDS),
    "FEDEMU_RUNTIME__TRANSPORT": "memory",
    "FEDEMU_RUNTIME__REPORT": "false",
    "FEDEMU_RUNTIME__LOG_LEVEL": "warning",
}
"""What makes the runs of a page short. Settings on the page's own command lines and its ``run with`` comments win."""
LAST_WORDS = 30
"""The number of lines of a failed block that are shown."""
PATIENCE = 10.0
"""Seconds for a shell to end."""


class PageFailed(AssertionError):
    """A block of a page did not run to its end."""


def play(page: Page, folder: Path, environment: Mapping[str, str]) -> int:
    """Run all blocks of a page that are not marked otherwise; returns how many. PageFailed if one does not succeed.

    ``environment`` has a PATH on which ``fedemu`` and ``blocks`` (of Python) are found.
    """
    played = 0
    with _Session(folder, {**environment, **CHEAP}) as session:
        for block in page.blocks():
            if block.file is not None:
                (folder / block.file).write_text(block.text, encoding="utf-8")
            if block.not_run is None and block.language in ("console", "python"):
                problem = session.run(block)
                if problem is not None:
                    raise PageFailed(f"{page.path.name}:{block.line}: {problem}")
                played += 1
    return played


class _Session:
    """A shell and, once it is needed, a Python; both keep their variables from block to block."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = environment
        self.shell = self._start("bash", "--norc", "--noprofile")
        self.python: subprocess.Popen[str] | None = None
        self.said = folder / ".said"

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.shell, self.python):
            if process is not None:
                with suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=PATIENCE)  # an end of file ends both
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # what the page left in the background, too
                process.wait()

    def run(self, block: Block) -> str | None:
        """Run one block. None if all went well, else the last lines that the block wrote."""
        script = self.folder / ".block"
        script.write_text(block.text if block.language == "python" else _script(block), encoding="utf-8")
        if block.language == "python":
            self.python = self.python or self._start("blocks", stderr=self.said.open("w"))
            answer = _ask(self.python, str(script))
        else:
            self.shell = self.shell if self.shell.poll() is None else self._start("bash", "--norc", "--noprofile")
            answer = _ask(self.shell, f". {shlex.quote(str(script))} </dev/null >.said 2>&1; echo {DONE}")
        if answer:
            return None
        last = self.said.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_WORDS:]
        return "\n".join(["the block failed; it said last:", *last])

    def _start(self, *words: str, stderr: IO[str] | int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        return subprocess.Popen(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            bufsize=1,
            start_new_session=True,
        )


def _ask(process: subprocess.Popen[str], line: str) -> bool:
    """Send a line to a process. True once the process says that it is done, False if it failed and ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return any(said == f"{DONE}\n" for said in iter(process.stdout.readline, ""))


def _script(block: Block) -> str:
    """The commands of a block. After them the variables of the environment have their old values."""
    set_up = [f"export {name}={shlex.quote(value)}" for name, value in block.variables.items()]
    clean_up = [
        f"export {name}={shlex.quote(CHEAP[name])}" if name in CHEAP else f"unset {name}" for name in block.variables
    ]
    return "\n".join(["set -e", *set_up, block.commands(), *clean_up, ""])


def environment(commands: Path) -> dict[str, str]:
    """The environment of this process without fedemu's settings; ``commands`` is a folder that goes first in PATH."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FEDEMU_", "PYTEST_"))}
    folders = {"FEDEMU_CACHE": os.environ.get("FEDEMU_CACHE"), "FEDEMU_DATA": os.environ.get("FEDEMU_DATA")}
    return {
        **kept,
        **{name: value for name, value in folders.items() if value},
        "PATH": f"{commands}:{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
