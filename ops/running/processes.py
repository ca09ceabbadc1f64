"""What ``fedemu run`` and its children have in common: names, stop signals, and the line by which they talk."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from types import FrameType

from fedemu.ops.running.codes import STOP_SIGNALS
from fedemu.protocol.host.kernel import end_with_parent, keep_one_heap, name_process
from fedemu.protocol.host.streams import keep_streams

LEFT_EARLY = 130
"""The exit code of a child that was stopped before its work began. Nobody else knows yet that it has ended."""


def begin_child(name: str, parent: int) -> None:
    """Prepare a child of ``launch``. It ends with the process ``parent``, and a stop signal ends it at once.

    Nothing has begun yet, so nothing is lost; and ``os._exit`` is safe in the middle of an import.
    """
    keep_streams()
    keep_one_heap()
    name_process(name)
    for sign in STOP_SIGNALS:
        signal.signal(sign, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    end_with_parent(parent, signal.SIGTERM, LEFT_EARLY)


def announce(line: int) -> None:
    """Tell ``launch`` by its socket ``line`` that the devices may come. Returns when they have been called."""
    with socket.socket(fileno=line) as launcher, suppress(OSError):  # a launcher that is gone ends this process too
        launcher.send(b"!")
        launcher.recv(1)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(LEFT_EARLY)
