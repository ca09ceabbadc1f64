"""How an action ends: every error becomes an exit code, and one sentence on stderr."""

from __future__ import annotations

import errno
import json
import logging
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

import typer

from fedemu.ops.running.codes import INTERNAL_ERROR, INTERRUPTED, USAGE
from fedemu.ops.terminal import COMPLAINT
from fedemu.ops.watching.logs import log_crash, log_failure
from fedemu.protocol.code.own_code import Elsewhere, account, cause_of, own_frames, told, whole
from fedemu.protocol.errors import FedemuError, lacks_memory
from fedemu.protocol.host.files import is_full, refusal_of, shortage
from fedemu.protocol.host.private import temporary_folder

TOLD = "_FEDEMU_TOLD"
"""The environment variable with the file into which an error of somebody's own code is written, as ``Told`` in JSON.

The process that has started this one reads it.
"""

_OF_PATHS = frozenset(
    {errno.ENAMETOOLONG, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ELOOP, errno.EEXIST}
)
"""What is wrong with a path that the user has named, and not with fedemu."""
_NOWHERE = "the working folder no longer exists; change to another one"


def complain(text: str) -> None:
    """Tell the user one sentence on stderr, without a full stop. The lines of an account may follow it."""
    sentence = text if text.endswith(("..", " .")) else text.removesuffix(".")  # the working folder is no stop
    print(f"{COMPLAINT}{_visible(sentence)}", file=sys.stderr, flush=True)


def exit_code_of(action: Callable[[], int]) -> int:
    """Run ``action`` and return its code. An error is told in one sentence, and its code is returned.

    If somebody's own code failed, his lines follow, and how to see the whole traceback.
    """
    try:
        return action()
    except FedemuError as error:
        if error.exit_code == USAGE and _is_nowhere():  # what the user has named is not found from there
            complain(_NOWHERE)
        else:
            _tell(error, error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        complain("interrupted")
        return INTERRUPTED
    except typer.Exit:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, BrokenPipeError) and _is_unread():
            # The reader of stdout went away (`fedemu presets | head -1`). Nobody reads what is left.
            _drop_output()
            return 0
        return _unforeseen(error)


def _visible(text: str) -> str:
    """A text that may quote somebody's code or data: terminals would obey control characters. The lines stay."""
    return "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in text)


def end_output(code: int) -> int:
    """Write what stdout still holds back, at the end of a command with this exit code. Returns the code.

    If that fails, an action that had succeeded has failed. The interpreter itself would try it too late to tell it.
    """

    def end() -> int:
        try:
            sys.stdout.flush()
        except OSError as error:
            _drop_output()
            if not code and not isinstance(error, BrokenPipeError):
                raise
        return code

    return exit_code_of(end)


def _is_unread() -> bool:
    """Whether stdout has lost its reader. Another pipe may be broken: one of somebody's own code, or to a process."""
    look = select.poll()
    try:
        look.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # it is no file of the system, or closed
        return False
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in look.poll(0))


def _drop_output() -> None:
    """Let stdout lead nowhere from now on, so that what it holds back cannot fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unforeseen(error: Exception | SystemExit) -> int:
    """Tell an error that is none of fedemu's, or that somebody's own code has called ``exit``. Returns its code."""
    if isinstance(error, OSError) and is_full(error):
        complain(f"{error.filename or 'the output or a file'} cannot be written: {refusal_of(error)}")
    elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        complain(f"{error.filename or 'a file'} cannot be opened, because too many files are open; raise ulimit -n")
    elif isinstance(error, RuntimeError) and (lacking := shortage(error)) and not lacks_memory(error):
        complain(f"no thread can be started on this machine: {lacking}")
    elif isinstance(error, OSError) and error.filename is None and (unplaced := _lacking_place()):
        # Standard library and libraries ask for a folder of temporary files in ways of their own.
        complain(str(unplaced))
        return unplaced.exit_code
    elif own_frames(error):
        _tell(FedemuError(account(error)), INTERNAL_ERROR, error)
    elif isinstance(error, OSError) and error.errno in _OF_PATHS and error.filename is not None:
        name = str(error.filename)
        complain(f"{name if len(name) <= 80 else f'{name[:77]}...'} can't be used: {error.strerror}; name another")
        return USAGE
    elif isinstance(error, FileNotFoundError) and error.filename is None and _is_nowhere():
        complain(_NOWHERE)
        return USAGE
    else:
        _shown(error)
        said = f"internal error: {type(error).__name__}: {error}"
        if lacks_memory(error):
            said = f"this machine has too little memory: {account(error)}"
        log = log_crash(error)
        complain(said if log is None else f"{said} (the traceback is in {log})")
    return INTERNAL_ERROR


def _lacking_place() -> FedemuError | None:
    """Why there is no folder for temporary files. None if there is one."""
    try:
        temporary_folder()
    except FedemuError as error:
        return error
    return None


def _is_nowhere() -> bool:
    """Whether somebody has removed the folder in which this process works."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def _tell(error: FedemuError, code: int, cause: BaseException | None = None) -> None:
    """Tell an error, and where its traceback is if somebody else's code has raised it."""
    cause = cause_of(error) if cause is None else cause
    if cause is None:
        complain(str(error))
        return
    error.__cause__ = cause
    if file := os.environ.get(TOLD):
        Path(file).write_text(json.dumps(told(error)), encoding="utf-8")
    log = log_failure(error)
    if _shown(error) or "\n" not in str(error):
        complain(str(error))
    elif isinstance(cause, Elsewhere):  # it came from a device, as a text
        file = "devices.out of the run (coordinator.log with --transport memory)"
        complain(f"{error}\n    the whole traceback is in logs/{file}, or where fedemu device runs")
    elif log is None or code == USAGE:  # a run that cannot begin leaves no folder, and so no log
        complain(f"{error}\n    --log-level debug shows the whole traceback")
    else:
        complain(f"{error}\n    the whole traceback is in {log}")


def _shown(error: BaseException) -> bool:
    """Whether everything is to be seen, so that the whole traceback was printed."""
    if not logging.getLogger().isEnabledFor(logging.DEBUG):
        return False
    print(whole(error), file=sys.stderr, flush=True)
    return True
