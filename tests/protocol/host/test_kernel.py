"""Processes that end with their parent, their names, and their one heap."""

import os
import platform
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")

PARENT = textwrap.dedent("""
    import os, subprocess, sys
    child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid()), sys.argv[2]], stdout=subprocess.PIPE)
    print(child.stdout.readline().decode(), flush=True)
    os.read(0, 1)
    os._exit(0)
""")
CHILD = textwrap.dedent("""
    import os, signal, sys, time
    from fedemu.protocol.host.kernel import end_with_parent

    def heard(*_):
        open(sys.argv[2], "w").write("SIGTERM")
        os._exit(0)

    signal.signal(signal.SIGTERM, heard)
    end_with_parent(int(sys.argv[1]){signal})
    print(os.getpid(), flush=True)
    while True:  # pause() misses a signal that comes just before it
        time.sleep(0.02)
""")


@pytest.mark.parametrize(
    ("chosen", "heard"), [("", ""), (", signal.SIGTERM", "SIGTERM")], ids=["by SIGKILL", "by a chosen signal"]
)
def test_a_process_ends_with_its_parent(tmp_path: Path, chosen: str, heard: str) -> None:
    told = tmp_path / "told"
    told.touch()
    command = [sys.executable, "-c", PARENT, CHILD.format(signal=chosen), str(told)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.communicate("the end", timeout=60)
            assert select.select([child], [], [], 10)[0] == [child], "the child ends within ten seconds"
        except BaseException:
            signal.pidfd_send_signal(child, signal.SIGKILL)
            raise
        finally:
            os.close(child)
    assert told.read_text() == heard


def test_a_process_whose_parent_has_ended_already_exits_at_once_with_the_code() -> None:
    code = "from fedemu.protocol.host.kernel import end_with_parent; end_with_parent(1, code=7)"
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert ended.returncode == 7


def test_the_name_of_a_process_is_cut_to_what_the_kernel_keeps() -> None:
    code = (
        "from fedemu.protocol.host.kernel import name_process; name_process('fedemu-a-long-name')\n"
        "print(open('/proc/self/comm').read())"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.strip() == "fedemu-a-long-n"


HEAPS = """
import ctypes, sys, threading
from fedemu.protocol.host.kernel import keep_one_heap
libc = ctypes.CDLL(None)
if sys.argv[1] == "one":
    keep_one_heap()
threads = [threading.Thread(target=libc.malloc, args=(1000,)) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.malloc_stats()
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives threads heaps of their own")
def test_threads_share_one_heap() -> None:
    heaps = {
        wanted: subprocess.run(
            [sys.executable, "-c", HEAPS, wanted], capture_output=True, text=True, check=True
        ).stderr.count("Arena ")
        for wanted in ("one", "several")
    }
    assert heaps["one"] == 1 < heaps["several"]


HOLES = """
import os
from fedemu.protocol.host.kernel import give_memory_back
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
blocks = [bytes([1]) * 50_000 for _ in range(1000)]
last = blocks.pop()  # it lies behind the others, so that glibc keeps their memory when they are gone
del blocks
before = resident()
give_memory_back()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is known to keep what is free")
def test_what_is_free_is_given_back() -> None:
    ended = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(ended.stdout) > 40_000_000


LARGE_BLOCKS = """
import ctypes, resource, sys
from fedemu.protocol.host.kernel import keep_blocks
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
if sys.argv[1:]:
    keep_blocks()
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = libc.malloc(2**26)
    ctypes.memset(block, 1, 2**26)
    libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this system's allocator is not that of glibc")
def test_large_blocks_are_kept_for_the_next_ones_that_are_needed() -> None:
    faults = [
        int(subprocess.run([sys.executable, "-c", LARGE_BLOCKS, *words], capture_output=True, check=True).stdout)
        for words in ([], ["keep"])
    ]
    assert faults[0] >= 2**26 // 2**21, "one for each page, of which the largest have 2 MiB"
    assert faults[1] < faults[0] / 4


@pytest.mark.parametrize(("handler", "more"), [("SIG_IGN", []), ("SIG_DFL", ["SIGHUP"])])
def test_a_hangup_stops_a_process_unless_it_is_ignored(handler: str, more: list[str]) -> None:
    code = (
        f"import signal; signal.signal(signal.SIGHUP, signal.{handler})\n"
        "from fedemu.protocol.host.kernel import stop_signals; print(*(sign.name for sign in stop_signals()))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.split() == ["SIGINT", "SIGTERM", *more]
