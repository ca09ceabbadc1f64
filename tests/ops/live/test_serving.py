"""The page as a command serves it."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from fedemu.coordinator.record.holder import UNNAMED
from fedemu.ops.live import server, serving, starting
from fedemu.protocol.errors import ConfigurationError, FedemuError

LIMIT = 32
"""The open files that the page may have: less than the connections that may wait, and its own files."""


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


COMMAND = 10
"""The process id of a command that has started a page."""


class Command:
    """A command that has started a page, in place of this process. The page asks now and then whether it is there."""

    def __init__(self) -> None:
        self.has_ended = False
        self.missed = 0
        """How often the page has asked since then."""

    def parent(self) -> int:
        """The parent of the page: once the command has ended, it is the process that adopts others."""
        self.missed += self.has_ended
        return 1 if self.has_ended else COMMAND


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command of a page that does not linger, looks often, and soon notices that a viewer has left."""
    command = Command()
    monkeypatch.setattr(serving.os, "getppid", command.parent)
    monkeypatch.setattr(serving, "ASK_SECONDS", 0.05)
    monkeypatch.setattr(serving, "LINGER_SECONDS", 0.0)
    monkeypatch.setattr(server, "FIND_SECONDS", 0.01)
    monkeypatch.setattr(server, "BEAT_SECONDS", 0.01)
    return command


def visited(directory: Path, visit: Callable[[str], None], command: Command, **how: Any) -> None:
    """Serve a page, and visit its address in a thread. Then the command ends, and the page is no longer wanted."""

    def visit_and_end(address: str) -> None:
        try:
            visit(address)
        finally:
            command.has_ended = True

    with ThreadPoolExecutor(1) as pool:
        visits: list[Future[None]] = []

        def opened(address: str, token: str) -> None:
            visits.append(pool.submit(visit_and_end, address))

        serving.serve_page([directory], None, opened, COMMAND, **how)
        visits[0].result()


def lines_of(address: str) -> Iterator[bytes]:
    """The lines of the page's stream until it ends, for 30 seconds at most."""
    end = time.monotonic() + 30
    with urlopen(f"{address}api/stream", timeout=30) as stream:
        while line := stream.readline():
            assert time.monotonic() < end
            yield line


def test_runs_that_begin_later_come_to_the_page(make: Any, command: Command) -> None:
    first, second = make("first").directory, make("second").directory

    def visit(address: str) -> None:
        snapshots = (line for line in lines_of(address) if line == b"event: snapshot\n")
        assert len([*islice(snapshots, 2)]) == 2

    visited(first, visit, command, find=lambda: [first, second])


def test_the_page_of_a_command_that_has_ended_is_served_as_long_as_somebody_watches(
    made: Any, command: Command
) -> None:
    def visit(address: str) -> None:
        for _ in lines_of(address):
            command.has_ended = True
            if command.missed == 2:
                return
        pytest.fail("it is not served any more")

    visited(made.directory, visit, command)


def states(address: str) -> Iterator[str]:
    """The states of the run that the page's stream tells."""
    for line in lines_of(address):
        if told := re.search(rb'"state":"(\w+)"', line):
            yield told[1].decode()


def test_a_run_is_starting_as_long_as_its_command_is_there_and_has_started_no_coordinator(
    made: Any, command: Command
) -> None:
    def visit(address: str) -> None:
        told = states(address)
        assert next(told) == "starting"
        command.has_ended = True
        assert next(told) == "stopped"

    visited(made.directory, visit, command)


def test_a_coordinator_that_comes_and_goes_while_nobody_watches_is_noticed(
    made: Any, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = threading.Event()

    def holder_of(path: Path) -> int | None:
        if seen.is_set():
            return None
        seen.set()
        return UNNAMED

    def visit(address: str) -> None:
        assert seen.wait(30)
        assert next(states(address)) == "stopped"

    monkeypatch.setattr("fedemu.ops.live.run.holder_of", holder_of)
    visited(made.directory, visit, command)


def test_a_page_that_cannot_follow_its_runs_any_more_ends_with_the_reason(made: Any, command: Command) -> None:
    def visit(address: str) -> None:
        for _ in lines_of(address):
            pass

    with pytest.raises(ValueError, match=r"^odd$"):
        visited(made.directory, visit, command, find=MagicMock(side_effect=ValueError("odd")))


def test_nonsense_of_strangers_is_not_logged(made: Any, command: Command, caplog: pytest.LogCaptureFixture) -> None:
    def visit(address: str) -> None:
        with socket.create_connection(("127.0.0.1", urlsplit(address).port or 0), timeout=30) as stranger:
            stranger.sendall(b"GET / HTTP/9.1\r\n\r\n")
            assert re.match(rb"HTTP/1\.[01] 400 ", stranger.recv(100))

    visited(made.directory, visit, command)
    assert caplog.messages == []


class Opened(Exception):
    """The page was opened."""


def opened(address: str, token: str) -> None:
    raise Opened(address)


def test_a_page_takes_the_port_that_was_just_in_use_and_no_other_address(made: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as former:
        port = former.getsockname()[1]
        viewer = socket.create_connection(("127.0.0.1", port))
        former.accept()[0].close()  # first at this end, where the connection stays for a minute
        viewer.close()

    def look(address: str, token: str) -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port))
        opened(address, token)

    with pytest.raises(Opened, match=f"^http://127.0.0.1:{port}/$"):
        serving.serve_page([made.directory], port, look)


def test_a_port_that_is_taken_is_told_and_without_a_port_the_next_one_is_served(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(serving, "FIRST_PORT", port)
        said = f"^port {port} can't be used: Address already in use; name another one$"
        with pytest.raises(ConfigurationError, match=said):
            serving.serve_page([made.directory], port, opened)
        with pytest.raises(Opened) as told:
            serving.serve_page([made.directory], None, opened)
    assert port < int(str(told.value).rpartition(":")[2].strip("/")) <= port + 40


def test_the_page_of_a_run_is_out_of_reach_of_ctrl_c_and_told_to_people(
    made: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    start, started = subprocess.Popen, []
    monkeypatch.setattr(starting.subprocess, "Popen", lambda *words, **how: started.append(start(*words, **how)))
    try:
        starting.start_page(made.directory)
        assert os.getsid(started[0].pid) == started[0].pid
    finally:
        for process in started:
            process.kill()
            process.wait()
    said = r"page   http://127\.0\.0\.1:\d+/#token=(\w{16})\ntoken  \1   \(for its buttons\)\n"
    told = capfd.readouterr()
    assert (told.out, bool(re.fullmatch(said, told.err))) == ("", True), told.err


def test_a_machine_that_starts_no_process_for_a_page_is_told_so(
    made: Any, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], set[str]]
) -> None:
    refused = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(starting.subprocess, "Popen", MagicMock(side_effect=refused))
    before = descriptors()
    with pytest.raises(ConfigurationError, match=r"^no process can be started on this machine: "):
        starting.start_page(made.directory)
    assert not descriptors() - before


@pytest.mark.parametrize("port", [None, 8160])
def test_a_machine_without_the_address_of_the_page_is_told_so(
    port: int | None, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "HOST", "192.0.2.1")  # a documentation address, which no machine has
    said = "^the page can't be served at 192.0.2.1: Cannot assign requested address$"
    with pytest.raises(ConfigurationError, match=said):
        serving.serve_page([made.directory], port, lambda address, token: None)


@pytest.mark.parametrize(
    ("source", "error", "said", "shown"),
    [
        ("serving.HOST = '192.0.2.1'", ConfigurationError, "the page can't be served at 192.0.2.1: Cannot", ""),
        ("raise ValueError('odd')", FedemuError, "the page could not be served; the lines above say why", "odd"),
    ],
)
def test_why_the_page_of_a_run_does_not_start_is_told_in_a_sentence(
    source: str,
    error: type[FedemuError],
    said: str,
    shown: str,
    made: Any,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    start = subprocess.Popen

    def with_source(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
        words = command[command.index("fedemu.ops.live.serving") + 1 :]
        script = f"import sys; from fedemu.ops.live import serving; {source}; sys.exit(serving.main({words!r}))"
        return start([sys.executable, "-c", script], **how)

    monkeypatch.setattr(starting.subprocess, "Popen", with_source)
    with pytest.raises(FedemuError, match=said) as told:
        starting.start_page(made.directory)
    assert type(told.value) is error
    err = capfd.readouterr().err
    assert shown in err
    assert ("Traceback" in err) == bool(shown)
