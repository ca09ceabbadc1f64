"""Figures of running processes, held against processes whose figures are known."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from fedemu.ops.bench.measuring import processes


@contextmanager
def running(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process that has run ``code`` and then waits."""
    command = [sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def test_the_beginning_of_a_process_lies_between_the_moments_around_its_fork() -> None:
    before = processes.now()
    with running("") as process:
        assert before - 0.011 <= processes.began(process.pid) <= processes.now()


def test_private_memory_grows_by_what_a_process_writes_for_itself() -> None:
    with running("") as small, running("kept = b'x' * 50_000_000") as large:
        found = processes.memory_of([small.pid, large.pid])
    assert 45 < found[1] - found[0] < 55


def test_a_process_that_has_ended_has_no_memory() -> None:
    with running("") as process:
        process.kill()
        process.wait()
        assert processes.memory_of([process.pid]) == []


def test_the_cpu_time_of_children_that_have_ended_is_counted() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    with running(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])") as process:
        assert processes.cpu_seconds(psutil.Process(process.pid)) >= 0.3


def test_a_few_milliseconds_of_cpu_time_are_told_exactly() -> None:
    burn = "import time\nwhile time.process_time() < {}: pass"
    for seconds in (0.5034, 0.5067):
        with running(burn.format(seconds)) as process:
            said = psutil.Process(process.pid)
            assert seconds <= processes.cpu_seconds(said) < seconds + 0.003


def test_the_cpu_time_of_a_process_that_is_gone_cannot_be_asked() -> None:
    with running("") as process:
        gone = psutil.Process(process.pid)
        process.kill()
        process.wait()
        with pytest.raises(psutil.NoSuchProcess):
            processes.cpu_seconds(gone)


# It takes a while to die, as the kernel has to take back its memory.
SLOW_TO_DIE = "kept = bytearray(200_000_000); print(flush=True); input()"
STUBBORN = f"""\
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {SLOW_TO_DIE!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()"""


def test_a_process_that_does_not_end_is_killed_with_its_children_and_they_are_gone_then() -> None:
    with running(STUBBORN) as process:
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children()]
        assert len(family) == 2
        processes.end(process, seconds=0.0)
        assert not any(lives(each) for each in family)


def lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # It may be gone between the two looks.
        return False


def test_descendants_are_found_by_name() -> None:
    with running("from fedemu.protocol.host.kernel import name_process\nname_process('fedemu-found')") as process:
        assert processes.descendants(os.getpid(), "fedemu-found") == [process.pid]
        assert processes.descendants(os.getpid(), "fedemu-lost") == []
