"""The page as a command serves it."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

LIMIT = 64
"""The open files that the page may have."""


def test_more_connections_than_open_files_are_told_once(made: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedemu.ops.cli", "watch", str(made.directory), "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT)),
    )
    assert process.stderr is not None
    with process, ExitStack() as connections:
        try:
            assert process.stderr.readline().startswith("page ")
            assert process.stderr.readline().startswith("token ")
            for _ in range(2 * LIMIT):
                connections.enter_context(socket.create_connection(("127.0.0.1", port)))
            told = process.stderr.readline()
            process.send_signal(signal.SIGINT)
            said = "the limit of open files is reached; raise it (ulimit -n)"
            assert told == f"fedemu: warning: a connection to the page has to wait: {said}\n"
            assert (process.stderr.read(), process.wait(30)) == ("", 0)
        finally:
            process.kill()
