"""Makes the processes that a machine starts, without an interpreter and its imports for each.

Run as ``python warm_children.py FD PARENT``, it imports what zygotes, toy trainers and the preparing of data need. For
every request on the socket FD it makes a process that goes on as one of them. ``CLONE_PARENT`` makes that a child of
the process PARENT, which waits for it and ends with it as if it had started it itself. ``conftest.py`` has the other
side.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedemu.device.machine import prepare
from fedemu.device.process import zygote
from fedemu.ops.stress.warm_process import MESSAGE_BYTES, _be, _open_streams, _put, _set_environment
from fedemu.protocol.host.garbage import settle
from fedemu.protocol.host.kernel import end_with_parent, name_process

sys.path.insert(0, str(Path(__file__).parent))
import toy_trainer

CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
BECOMES: Mapping[str, Callable[[list[str]], object]] = {
    "zygote": zygote.main,
    "prepare": prepare.main,
    "toy trainers": lambda words: toy_trainer.run_nursery(words, toy_trainer.open_runner),
}


def serve(line: socket.socket) -> None:
    """Make a process for every request, until the other side closes the line."""
    python, system = ctypes.pythonapi, ctypes.PyDLL(None)
    while True:
        content, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 32)
        if not content:
            return
        python.PyOS_BeforeFork()
        pid = system.syscall(SYS_CLONE, CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if pid == 0:
            python.PyOS_AfterFork_Child()
            line.close()
            become(json.loads(content), descriptors)
        python.PyOS_AfterFork_Parent()
        for descriptor in descriptors:
            os.close(descriptor)
        line.send(str(pid).encode())


def become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Go on as the process that was asked for, and end."""
    os.setpgid(0, request["group"])
    _put(dict(zip(request["targets"], descriptors, strict=True)))
    _open_streams()
    name_process("python")
    _set_environment(request["environment"])
    os.chdir(request["folder"])
    _be(lambda: BECOMES[request["what"]](request["words"]), 0)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))
    name_process("fedemu-warm")
    settle()
    with socket.socket(fileno=int(sys.argv[1])) as line:
        serve(line)
