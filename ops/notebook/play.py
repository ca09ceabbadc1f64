"""Plays runs in a process of their own, which is ``fedemu run --resume``, and shows its lines while it goes on.

If this process is killed, the run stops with a checkpoint.
"""

from __future__ import annotations

import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedemu.ops.experiment import Runtime
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.ops.notebook.settings import without_settings
from fedemu.ops.notebook.shown import Shown
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.running.exits import TOLD
from fedemu.ops.running.launch import child_command
from fedemu.ops.terminal import COMPLAINT, complaint_in
from fedemu.protocol.code.own_code import Told
from fedemu.protocol.host.paths import exists
from fedemu.protocol.host.starting import starting

STOP_PATIENCE = 60.0
"""The real seconds that an interrupted run may take to end."""
LOOK_SECONDS = 0.5
"""How often a silent run is asked whether it has ended."""
LAST_LINES_SECONDS = 1.0
"""The most real seconds in which the last lines of a run are read after its end.

A process that somebody's own code has left behind keeps the pipe open for as long as it lives.
"""
_TRACK = "FEDEMU_TRACK"
"""The variable of the table [track]."""
_KEPT_LINES = 1000
"""The last lines of a run, among which its complaint is."""
_COLOURS = frozenset({"FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE"})
"""Environment variables that make programs draw in colours, and in place, where there is no terminal."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f]")


@dataclass(frozen=True)
class Ended:
    """How the process of a run ended: its exit code, its error or "", and the error in somebody's own code, if any."""

    code: int
    words: str = ""
    cause: Told | None = None


def play(folder: Path, runtime: Runtime, shown: Shown, seeds: Sequence[int] = ()) -> Ended:
    """Play the run that ``folder`` holds, or these ``seeds`` of its group.

    An interrupt (KeyboardInterrupt) stops the run with a checkpoint. Its code is then that of Interrupted, unless it
    was about to end or says another reason. A second one kills it; its last finished round is kept.
    """
    with tempfile.TemporaryDirectory(prefix="fedemu-") as beside:
        told = Path(beside) / "told.json"
        code, words = _play(folder, runtime, shown, seeds, told)
        cause = Told(*json.loads(told.read_text(encoding="utf-8"))) if exists(told) else None
        return Ended(code, words, cause)


def _play(folder: Path, runtime: Runtime, shown: Shown, seeds: Sequence[int], told: Path) -> tuple[int, str]:
    """Play the run as ``play`` does. An error of somebody's own code goes to the file ``told``."""
    command = child_command("fedemu-run", "fedemu.ops.cli.__main__", "run", "--resume", str(folder))
    if seeds:
        command += ["--seeds", ",".join(map(str, seeds))]
    given = runtime.model_dump(exclude_unset=True)
    # Everybody can read command lines, and the address of a tracker may hold a password.
    variables = {_TRACK: toml_value(given.pop("track"))} if "track" in given else {}
    for key, value in given.items():
        command += ["--set", f"runtime.{key}={toml_value(value)}"]
    with starting():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment_of_a_run(os.environ) | variables | {TOLD: str(told)},
            # Ctrl-C must not reach the run directly, as it is passed on below.
            start_new_session=True,
        )
    assert process.stderr is not None
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    is_over = threading.Event()
    reader = threading.Thread(target=_read, args=(process.stderr, lines, is_over), daemon=True)
    reader.start()
    said: deque[str] = deque(maxlen=_KEPT_LINES)
    is_interrupted = False
    try:
        try:
            for line in _until_end(process, lines):
                said.append(line)
                shown.line(line)
            process.wait()
        except KeyboardInterrupt:
            is_interrupted = True
            shown.line("stopping after this round's checkpoint")
            process.send_signal(signal.SIGINT)
            process.wait(STOP_PATIENCE)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join(LAST_LINES_SECONDS)
        is_over.set()
        lines.put(None)
    for line in iter(lines.get, None):
        said.append(line)
        if not is_interrupted:
            shown.line(line)
    words = complaint_in(said).removeprefix(COMPLAINT)
    # A process that does not listen to signals yet is ended by the interrupt, and says nothing.
    ended_early = is_interrupted and process.returncode != 0 and not words
    return INTERRUPTED if ended_early else process.returncode, words


def environment_of_a_run(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for the process of a run, which has its settings already and writes plain lines."""
    return {name: value for name, value in without_settings(environment).items() if name not in _COLOURS}


def _until_end(process: subprocess.Popen[str], lines: queue.SimpleQueue[str | None]) -> Iterator[str]:
    """The lines that come until the process has ended or has said its last one. Others may still be in the queue."""
    while process.poll() is None:
        with suppress(queue.Empty):
            if (line := lines.get(timeout=LOOK_SECONDS)) is None:
                return
            yield line


def _read(pipe: IO[str], to: queue.SimpleQueue[str | None], is_over: threading.Event) -> None:
    """Pass the lines of a run on without control codes, and None after the last one. Then close the pipe.

    What comes when the run ``is_over`` is read and dropped: a process that was left behind may go on writing there.
    """
    try:
        with pipe:
            for line in pipe:
                if not is_over.is_set():
                    to.put(_CONTROL.sub("", line.rstrip("\n")))
    finally:
        to.put(None)
