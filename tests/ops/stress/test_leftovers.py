"""What a run leaves behind is found: processes, shared memory, descriptors."""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys
from pathlib import Path

from fedemu.ops.stress.leftovers import SHARED_MEMORY, Descriptors, of_sessions, orphaned_memory, shared_memory


def test_a_process_of_a_session_is_found_until_it_ends() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        assert [line.split()[0] for line in of_sessions([process.pid], 0.0)] == [str(process.pid)]
        process.kill()
        process.wait()
    assert of_sessions([process.pid], 0.0) == []


def test_shared_memory_counts_only_if_nobody_uses_it(tmp_path: Path) -> None:
    before = shared_memory()
    path = SHARED_MEMORY / f"fedemu-test-{os.getpid()}"
    with path.open("wb"):
        assert str(path) not in orphaned_memory(before)
    named = tmp_path / os.fsdecode(b"caf\xe9")  # a name in Latin-1, as another process may have mapped one
    for file in (path, named):
        file.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        file.close()
        with named.open("rb") as other, mmap.mmap(other.fileno(), 0, access=mmap.ACCESS_READ):
            assert str(path) not in orphaned_memory(before)
        assert len(mapped) == mmap.PAGESIZE
    assert str(path) in orphaned_memory(before)
    path.unlink()
    assert str(path) not in orphaned_memory(before)


def test_a_semaphore_counts_only_if_nobody_has_it_open() -> None:
    before = shared_memory()
    held = "import multiprocessing as m; l = m.get_context('spawn').Lock(); print(l._semlock.name, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        path = SHARED_MEMORY / f"sem.{process.stdout.readline().decode().strip().removeprefix('/')}"
        assert path.exists()
        assert str(path) not in orphaned_memory(before)
        process.communicate(b"\n")
    assert str(path) not in orphaned_memory(before)


def test_descriptors_have_grown_only_if_they_stay_many_after_the_last_accident() -> None:
    numbers = iter([20, 90, 90, 30, 45, 45, 45, 30, 45, 45, 45, 45])
    times = itertools.count()
    descriptors = Descriptors(lambda: next(numbers), lambda: float(next(times)))
    descriptors.begin()
    for _ in range(2):
        descriptors.sample()
    descriptors.struck()
    for _ in range(4):
        descriptors.sample()
    assert descriptors.grown() == []
    descriptors.struck()
    for _ in range(5):
        descriptors.sample()
    assert descriptors.grown() == []
    descriptors.last.remove(30)
    assert descriptors.grown() == ["the coordinator's open descriptors grew from 20 to 45"]
