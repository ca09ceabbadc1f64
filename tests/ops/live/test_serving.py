"""The page as a command serves it."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from fedemu.ops.live import serving, starting
from fedemu.protocol.errors import ConfigurationError, FedemuError

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
