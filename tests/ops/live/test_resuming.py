"""The command that resumes a run repeats what belongs to the machine, and tells why it failed."""

import errno
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedemu.ops.live.resuming import Resuming, resume_words
from fedemu.protocol.errors import FedemuError


@pytest.mark.parametrize(
    ("started", "resumed"),
    [
        ("python -m fedemu.ops.cli run digits --out x --seed 3 --page", "run --resume DIR"),
        (
            "fedemu run --trainers 2 digits --bind=tcp://127.0.0.1:99",
            "run --resume DIR --trainers 2 --bind tcp://127.0.0.1:99",
        ),
        (
            "fedemu coordinator --insecure --bind tcp://0.0.0.0:9 --set local.lr=1 --set runtime.report=false",
            "coordinator --resume DIR --insecure --bind tcp://0.0.0.0:9 --set runtime.report=false",
        ),
        (
            "fedemu run digits --on ray --nodes=2 --set track.to=tensorboard --set=runtime.trainers=2",
            "run --resume DIR --on ray --nodes 2 --set track.to=tensorboard --set runtime.trainers=2",
        ),
        (
            "fedemu run --set runtime={trainers=2} --set=track={to=['tensorboard']} --set local={lr=1} --set tracks=1",
            "run --resume DIR --set runtime={trainers=2} --set track={to=['tensorboard']}",
        ),
        ("python notebook.py", "run --resume DIR"),
    ],
)
def test_the_settings_of_the_machine_are_kept(started: str, resumed: str) -> None:
    assert resume_words(started.split(), Path("DIR")) == resumed.split()


def failure(resuming: Resuming) -> str:
    """Resume a run, and wait for the reason why it does not go on."""
    assert "was started" in resuming.start()
    end = time.monotonic() + 60
    while not (told := resuming.failure):
        assert time.monotonic() < end
        time.sleep(0.05)
    assert not resuming.is_under_way
    return told


def test_a_command_that_does_not_go_on_with_its_run_tells_why(made: Any) -> None:
    made.row(1)
    resuming = Resuming(made.directory)
    config = made.directory / "config.toml"
    settings = config.read_text()
    config.write_text(settings + "[")
    assert failure(resuming).startswith(f"{config} is not valid TOML")
    config.unlink()
    assert failure(resuming) == f"{made.directory} is no run directory: it has no config.toml"
    made.directory.joinpath("logs", "resumed.out").unlink()
    assert failure(resuming).startswith(f"{made.directory} is no run directory")


def test_a_run_goes_on_with_the_environment_variables_of_its_command(made: Any) -> None:
    resuming = Resuming(made.directory)
    variables = {**os.environ, "FEDEMU_OF_THE_RUN": "1"}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"begun\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"begun\n"  # Before that the system may not know its variables.
        resuming.remember(psutil.Process(process.pid))
    assert failure(resuming).startswith("the environment variable FEDEMU_OF_THE_RUN names no setting")


def test_a_run_whose_folder_takes_no_file_is_not_resumed(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resuming = Resuming(made.directory)

    def is_full(path: Path, **_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", is_full)
        with pytest.raises(FedemuError, match=r"logs/resumed.out cannot be written: the disk is full; make room there"):
            resuming.start()
    (made.directory / "logs").touch()
    with pytest.raises(FedemuError, match=r"logs/resumed.out cannot be written: File exists"):
        resuming.start()
    shutil.rmtree(made.directory)
    with pytest.raises(FedemuError, match=f"the folder {made.directory} is gone"):
        resuming.start()


def test_a_process_that_can_not_be_started_is_told(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    resuming = Resuming(made.directory)

    def refuses(*_: Any, **__: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("fedemu.ops.live.resuming.subprocess.Popen", refuses)
    with pytest.raises(FedemuError, match="no process can be started on this machine: the limit of processes"):
        resuming.start()
