"""Runs the source of a class or a function once more, in a process of its own, to see whether it is still as it says.

The process is a copy of this one. So nothing happens here to variables, generators and registries, whatever the source
does, and what it gives can be compared with what is here.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

from fedemu.ops.notebook.changes import first_change
from fedemu.protocol.host.kernel import end_with_parent
from fedemu.protocol.host.starting import starting

SECONDS = 20.0
"""The longest time for which the source may run. A lock of another thread may hold it up for ever."""
_MOST_BYTES = 4096
"""The length of the longest answer: a pipe takes as many at once."""


class Change(NamedTuple):
    """The name of a class or a function that has changed since its definition, and what of it, in words."""

    name: str
    what: str


def changed_since(text: str, home: str, parts: Sequence[str]) -> Change | None:
    """What no longer is as ``text`` says: the source of the classes and functions ``parts`` of the module ``home``.

    None if nothing is found, or if the text cannot run a second time. Raises ConfigurationError if this machine starts
    no process.
    """
    # A fork is safe in a thread that has never computed; coordinator/rounds/server_job.py tells why.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_asked, text, home, parts).result()


def _asked(text: str, home: str, parts: Sequence[str]) -> Change | None:
    reading, writing = os.pipe()
    parent = os.getpid()
    try:
        with warnings.catch_warnings(), starting():
            warnings.simplefilter("ignore")  # Python and some libraries warn of any fork beside threads
            pid = os.fork()
        if pid == 0:
            try:
                _settle(parent)
                os.write(writing, json.dumps(_found(text, home, parts)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        writing = -1
        answered = select.poll()
        answered.register(reading, select.POLLIN)
        said = os.read(reading, _MOST_BYTES) if answered.poll(SECONDS * 1000) else b""
        with suppress(ProcessLookupError, ChildProcessError):  # somebody else has waited for its end
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    found = json.loads(said) if said else None
    return None if found is None else Change(*found)


def _settle(parent: int) -> None:
    """Separate this process from what its parent's threads, signals and terminal do."""
    end_with_parent(parent)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    gc.freeze()  # the garbage collector never touches objects of the parent here
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    sys.stdout = sys.stderr = os.fdopen(null, "w")  # that of a notebook sends what it gets to the browser
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)  # a copy of this process has no other threads


def _found(text: str, home: str, parts: Sequence[str]) -> tuple[str, str] | None:
    here = vars(sys.modules[home])
    with suppress(BaseException):  # it cannot run a second time, or ends its process
        return first_change(here, (_run(text, home), _run(text, home)), parts)
    return None


def _run(text: str, home: str) -> Mapping[str, Any]:
    """The names that a text defines. It runs as the module ``home``, where classes look for their own module."""
    module = sys.modules[home] = ModuleType(home)
    exec(compile(text, "<cells>", "exec", dont_inherit=True), vars(module))
    return vars(module)
