"""NVIDIA's Multi-Process Service, by which the kernels of several processes run on a GPU at the same time.

Without it the processes take turns. Its daemon is started here in a folder of its own, so that it serves nobody else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fedemu.ops.bench.peers.environments import Absent, last_words
from fedemu.protocol.host.paths import exists

CONTROL: Final = "nvidia-cuda-mps-control"
_POLL_SECONDS: Final = 0.02


@contextmanager
def mps(seconds: float = 20.0) -> Iterator[Mapping[str, str]]:
    """A daemon of the service. Processes that start with the variables that it yields use it.

    It gets ``seconds`` to start, and as many to end. Raises Absent if this machine does not have it, or if it does not
    start.
    """
    control = shutil.which(CONTROL)
    if control is None:
        raise Absent(f"{CONTROL} is not on this machine; it comes with NVIDIA's driver")
    with tempfile.TemporaryDirectory(prefix="fedemu-mps-", ignore_cleanup_errors=True) as folder:
        pipes, logs, errors = (Path(folder) / name for name in ("pipe", "log", "errors"))
        pipes.mkdir()
        logs.mkdir()
        variables = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        environment = os.environ | variables
        with errors.open("w") as file:
            # In the foreground the daemon stays a child of this process, and in a session of its own with its servers.
            daemon = subprocess.Popen(
                [control, "-f"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + seconds
            while not exists(pipes / "control"):
                if daemon.poll() is not None or time.monotonic() > deadline:
                    raise Absent(f"{CONTROL} did not start: {last_words(errors.read_text(errors='replace'))}")
                time.sleep(_POLL_SECONDS)
            yield variables
        finally:
            _end(daemon, control, environment, seconds)


def _end(daemon: subprocess.Popen[bytes], control: str, environment: Mapping[str, str], seconds: float) -> None:
    """End the daemon and its servers: by its own command, and if that does not help, by force."""
    with suppress(subprocess.TimeoutExpired, OSError):
        if daemon.poll() is None:
            subprocess.run(
                [control], env=environment, input=b"quit\n", capture_output=True, timeout=seconds, check=False
            )
            daemon.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(daemon.pid, signal.SIGKILL)
    daemon.wait()
