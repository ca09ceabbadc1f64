"""Prepares this machine's copy of the data in a process of its own. Its end frees the memory that decoding takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from fedemu.device.machine.forkers import killed
from fedemu.protocol.code.named import load, restrict
from fedemu.protocol.code.own_code import Told, account, own_frames, retold, told
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import ConfigurationError, DataError, FedemuError
from fedemu.protocol.host.files import refusal_of, shortage
from fedemu.protocol.host.kernel import end_with_parent
from fedemu.protocol.host.phases import mark
from fedemu.protocol.host.starting import starting
from fedemu.protocol.wording import ending

log = logging.getLogger(__name__)

SAID = 69
"""The exit code after an error that is on the last line of stdout: a ``Told`` as JSON. An interpreter that cannot begin
ends with 1, and has said nothing there."""
_MOST_DEATHS = 3
"""So many processes may be killed over the data, as trainers may over a job."""
_NOTHING_TO_SAY = 70
"""The exit code after a bug, whose traceback is on stderr."""


async def prepare_data(prepare: str, experiment: Path, expected: str, allow_code: Sequence[str] | None = ()) -> None:
    """Call the function named ``prepare`` with the bytes of the file ``experiment``, in another process.

    ``expected`` is the digest of the coordinator's data. The other process may load the code of ``allow_code`` and no
    other that the experiment names; with None it may load all. If it is killed, another one begins anew. Raises
    DataError if the function raises a DataError or returns another digest, FedemuError if a disk is full or no process
    can be started, and ConfigurationError if the process ends in another way, or is killed again and again.
    """
    for _ in range(_MOST_DEATHS):
        code, said = await _tried(prepare, experiment, allow_code)
        if code >= 0:
            break
        log.warning("the process that prepares the data %s", ending(code))
    if code == SAID:
        raise error_on(said)
    if code != 0:
        raise ConfigurationError(
            f"The process that prepares the data {ending(code)}; see its error output, which fedemu run keeps in "
            "logs/devices.out of the run"
        )
    compare_data(said, expected)


def command(prepare: str, experiment: str, allow_code: Sequence[str] | None) -> list[str]:
    """The command of the process, which ends with this one. ``prepare_data`` explains the arguments."""
    words = (prepare, experiment, str(os.getpid()), json.dumps(allow_code))
    return [*interpreter(), "-m", "fedemu.device.machine.prepare", *words]


async def _tried(prepare: str, experiment: Path, allow_code: Sequence[str] | None) -> tuple[int, str]:
    """The exit code of one such process, negative for a signal, and the last line that it has printed."""
    with starting(FedemuError):
        process = await asyncio.create_subprocess_exec(
            *command(prepare, str(experiment), allow_code),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,
        )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        await killed(process)
        raise
    text = output.decode(errors="replace").strip().splitlines()[-1:] or [""]
    return await process.wait(), text[0]


def error_on(line: str) -> FedemuError:
    """The error on the last line of a process that has prepared data: a DataError, unless the disk was to blame."""
    said = Told(*json.loads(line))
    return retold(said, FedemuError if said.exit_code == FedemuError.exit_code else DataError)


def compare_data(found: str, expected: str) -> None:
    """Raise DataError unless the digest that was ``found`` here equals ``expected``, that of the coordinator.

    It is the digest of the data, and of what is frozen in the model if anything is.
    """
    if found != expected:
        raise DataError(
            f"This machine's data, or what is frozen in its model, differ from the coordinator's: digest {found[:12]} "
            f"here, {expected[:12]} there. Give both the same data set (FEDEMU_DATA names the folder to look in first) "
            "and the same pre-trained weights."
        )


def main(arguments: list[str]) -> int:
    """Run the process. ``arguments`` are the words of ``command``."""
    function, experiment, parent, allow_code = arguments
    end_with_parent(int(parent))
    try:
        # What somebody's own code prints is no part of the answer, nor what a library or a program writes that it uses.
        answer = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        with answer, contextlib.redirect_stdout(sys.stderr):
            return _answer(function, Path(experiment), json.loads(allow_code), answer)
    except (Exception, SystemExit):
        sys.excepthook(*sys.exc_info())
        return _NOTHING_TO_SAY


def _answer(function: str, experiment: Path, allow_code: Sequence[str] | None, answer: TextIO) -> int:
    """Write the digest of the data, or an error as ``Told``. Returns the exit code."""
    try:
        prepare = load(function)
        restrict(allow_code)
        mark("data check", "imports")
        digest = prepare(_read(experiment))
        print(digest, file=answer)
        mark("data check", "data")
        return 0
    except FedemuError as error:
        said = told(error)
    except (Exception, SystemExit) as error:
        if own_frames(error):
            said = told(error, f"the data can't be prepared: {account(error)}")
        elif lacking := shortage(error):
            said = told(FedemuError(f"the data can't be prepared: {lacking}"))
        else:
            raise
    print(json.dumps(said), file=answer)
    return SAID


def _read(experiment: Path) -> bytes:
    try:
        return experiment.read_bytes()
    except OSError as error:  # somebody has moved or removed the folder of the devices
        raise FedemuError(f"the coordinator's experiment can't be read ({experiment}: {refusal_of(error)})") from error


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
