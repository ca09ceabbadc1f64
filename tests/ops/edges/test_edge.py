"""An edge as a command starts it, on a machine that allows few open files."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from fedemu.ops.edges.edge import LEAST_FILES, SPARE_FILES
from fedemu.ops.running.codes import INTERRUPTED, USAGE


def edge_with(open_files: int) -> subprocess.Popen[str]:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        up = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
    return subprocess.Popen(
        [sys.executable, "-m", "fedemu.ops.cli", "edge", "--connect", up, "--bind", "tcp://127.0.0.1:0"],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files)),
    )


@pytest.mark.parametrize("open_files", [64, LEAST_FILES - 1])
def test_an_edge_does_not_start_without_room_for_connections(open_files: int) -> None:
    _, told = (process := edge_with(open_files)).communicate(timeout=60)
    assert told == (
        f"fedemu: an edge needs 256 open files, and one more for each connection, but at most {open_files} are "
        "allowed; raise the limit (ulimit -Hn 4096)\n"
    )
    assert process.returncode == USAGE


def test_an_edge_says_that_its_limit_of_open_files_is_too_low_and_ends_with_its_code_if_it_is_stopped_twice() -> None:
    process, most = edge_with(LEAST_FILES), LEAST_FILES - SPARE_FILES
    assert process.stderr is not None
    with process, ExitStack() as connections:
        try:
            place = process.stderr.readline().partition(" and tcp://")[2].partition(";")[0]
            host, port = place.split(":")
            for _ in range(2 * most):
                connections.enter_context(socket.create_connection((host, int(port))))
            told = next(line for line in process.stderr if "WARNING" in line)
            said = f"a connection was closed: connections (1 so far); {most} fit the limit of open files, raise it"
            assert told.rstrip().endswith(f"{said} (ulimit -Hn)")
            for sign in (signal.SIGTERM, signal.SIGHUP):
                process.send_signal(sign)
                time.sleep(0.2)  # for up to a second it tries to send its goodbye
            assert process.wait(60) == INTERRUPTED
        finally:
            process.kill()
