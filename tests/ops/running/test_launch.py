"""Starting two children and seeing them to their end, with toys in place of the coordinator and the devices."""

import errno
import os
import random
import re
import signal
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

from fedemu.ops.running.child import _failed
from fedemu.ops.running.launch import _signals, child_command, free_address, launch, with_port
from fedemu.ops.running.launch_rules import Child, Patience
from fedemu.protocol.errors import ConfigurationError

BEGIN = (
    "import signal, sys; from fedemu.ops.running.processes import begin_child; begin_child('toy', int(sys.argv[1]))\n"
)
OPEN = "import sys; from fedemu.ops.running.processes import announce; announce(int(sys.argv[2]))\n"
WAIT = "import time\nwhile True: time.sleep(0.02)"  # pause() misses a signal that comes just before it
WAITS_FOR_SIGTERM = BEGIN + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + WAIT


QUICK = Patience(departure=0.05, retreat=0.05)


def toy(code: str) -> list[str]:
    return [sys.executable, "-c", code, str(os.getpid())]


def run(coordinator: str, devices: str, said: list[str] | None = None) -> tuple[int, dict[Child, int]]:
    pids: dict[Child, int] = {}
    ended = launch(
        {"coordinator": toy(coordinator), "devices": toy(devices)},
        {"coordinator": Path(os.devnull), "devices": Path(os.devnull)},
        said.append if said is not None else lambda text: None,
        lambda started: pids.update(started),
        QUICK,
    )
    assert ended.exit_code is not None
    return ended.exit_code, pids


def test_the_code_of_the_coordinator_is_the_code_of_the_run_and_nothing_is_left() -> None:
    code, pids = run(OPEN + "raise SystemExit(3)", WAITS_FOR_SIGTERM)
    assert code == 3
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_the_end_of_a_child_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedemu.ops.running.launch._LONGEST_SLEEP", 3600.0)
    assert run(OPEN + "raise SystemExit(3)", WAITS_FOR_SIGTERM)[0] == 3


def test_a_child_hears_no_stop_signal_before_it_can_heed_it() -> None:
    said: list[str] = []
    stopped = "import os, signal\nfor sign in (signal.SIGINT, signal.SIGTERM): os.kill(os.getpid(), sign)\n"
    code, _ = run(stopped + BEGIN, WAITS_FOR_SIGTERM, said)
    assert (code, said) == (4, [])


CALLED = """
import asyncio, pathlib, sys
from fedemu.ops.running.devices import called
asyncio.run(called(int(sys.argv[2])))
pathlib.Path({mark!r}).touch()
"""


def test_devices_begin_when_the_coordinator_has_opened(tmp_path: Path) -> None:
    begins = CALLED.format(mark=str(tmp_path / "mark"))
    waits = f"""
    import pathlib, time
    end = time.monotonic() + 20
    while not pathlib.Path({str(tmp_path / "mark")!r}).exists() and time.monotonic() < end:
        time.sleep(0.01)
    """
    code, pids = run(OPEN + textwrap.dedent(waits), begins)
    assert (code, len(pids), [path.name for path in tmp_path.iterdir()]) == (0, 2, ["mark"])


def test_devices_of_a_coordinator_that_never_opens_do_not_begin(tmp_path: Path) -> None:
    begins = BEGIN + CALLED.format(mark=str(tmp_path / "mark"))  # so that SIGTERM ends it at once
    ends = "import os, sys, time; os.close(int(sys.argv[2])); time.sleep(1.0); raise SystemExit(2)"
    code, pids = run(ends, begins)  # as a process that dies: its line is closed before it is gone
    assert (code, pids, list(tmp_path.iterdir())) == (2, {}, [])


def test_a_child_that_cannot_import_its_work_ends_with_a_sentence_and_the_documented_code(tmp_path: Path) -> None:
    ended = subprocess.run(
        child_command("toy", "fedemu.no_such_work"),
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    said = "fedemu: internal error: ModuleNotFoundError: No module named 'fedemu.no_such_work' (the traceback is in "
    assert (ended.returncode, ended.stderr.count("\n")) == (5, 1)
    assert ended.stderr.startswith(said)


def test_a_child_without_memory_for_any_import_ends_in_the_same_way(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fedemu.ops.running.exits", None)
    assert _failed(MemoryError()) == 5
    assert capfd.readouterr().err == "fedemu: this machine has too little memory: MemoryError()\n"


LAST = """
import atexit, os, signal

def main(words):
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return 5
"""


def test_a_signal_that_comes_when_a_child_has_done_its_work_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "last_work.py").write_text(LAST)
    ended = subprocess.run(
        child_command("toy", "last_work"),
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (5, "")


def test_no_stop_signal_is_lost_at_whatever_step_it_comes() -> None:
    with _signals() as (_, received):
        for wanted in range(500):
            step = 0

            def interrupt(frame: FrameType, event: str, _: object, wanted: int = wanted) -> Any:
                nonlocal step
                if frame.f_code is not received.__code__:
                    return None
                frame.f_trace_opcodes = True
                if event == "opcode":
                    step += 1
                    if step == wanted:
                        signal.raise_signal(signal.SIGTERM)
                return interrupt

            signal.raise_signal(signal.SIGINT)
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                taken = received()
            finally:
                sys.settrace(before)
            came = [signal.SIGINT, *[signal.SIGTERM] * (0 < wanted <= step)]
            assert taken + received() == came
            if step < wanted:
                break
    assert step > 20


def test_a_machine_that_starts_no_further_process_says_so_and_keeps_none(monkeypatch: pytest.MonkeyPatch) -> None:
    popen, started = subprocess.Popen, []

    def refuse_the_second(*command: Any, **named: Any) -> Any:
        if started:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        started.append(popen(*command, **named))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", refuse_the_second)
    said = "no process can be started on this machine: the limit of processes is reached; raise it (ulimit -u"
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        run(OPEN, WAITS_FOR_SIGTERM)
    assert not psutil.pid_exists(started[0].pid)


def test_a_killed_coordinator_is_an_interruption_and_takes_the_devices_along() -> None:
    said: list[str] = []
    code, pids = run(OPEN + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)", WAITS_FOR_SIGTERM, said)
    assert code == 4
    assert said == ["the coordinator was ended by SIGKILL (the kernel does so if memory runs out)"]
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


def test_a_killed_supervisor_is_started_again(tmp_path: Path) -> None:
    mark = tmp_path / "was-here"
    dies_once = f"""
    import os, pathlib, signal, socket, sys
    assert socket.socket(fileno=int(sys.argv[2])).recv(1)  # it is called, also when it is started again
    mark = pathlib.Path({str(mark)!r})
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (mark.parent / "again").touch()
    """
    waits = f"""
    import pathlib, time
    end = time.monotonic() + 20
    while not pathlib.Path({str(tmp_path / "again")!r}).exists() and time.monotonic() < end:
        time.sleep(0.01)
    """
    code, _ = run(OPEN + textwrap.dedent(waits), textwrap.dedent(dies_once))
    assert code == 0
    assert (tmp_path / "again").exists()


def test_children_have_sessions_variables_and_outputs_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C at a terminal reaches a whole session, and only this process is to hear it."""
    monkeypatch.setenv("OURS", "1")
    tells = "print(os.environ['OURS'], os.environ['GIVEN'], os.getsid(0) == os.getpid(), flush=True)\n"
    fails = "print('alas', file=sys.stderr)\n"
    new, old = tmp_path / "logs" / "new", tmp_path / "old"
    old.write_text("before\n")
    launch(
        {
            "coordinator": toy("import os\n" + OPEN + tells + fails),
            "devices": toy("import os\n" + BEGIN + tells + fails),
        },
        {"coordinator": new, "devices": old},
        lambda text: None,
        environment={"GIVEN": "2"},
    )
    assert (new.read_text(), old.read_text()) == ("1 2 True\nalas\n", "before\n1 2 True\nalas\n")


def test_a_child_reads_what_it_is_told_also_when_it_is_started_again_and_the_other_one_reads_nothing(
    tmp_path: Path,
) -> None:
    reads = "import os, sys; said = sys.stdin.read()\n"
    keeps = f"open({str(tmp_path / 'heard')!r}, 'a').write(said + '\\n')\n"
    dies_once = f"if os.path.getsize({str(tmp_path / 'heard')!r}) < 20: os.kill(os.getpid(), 9)\n"
    waits = f"""
    import time
    end = time.monotonic() + 20
    while said == "" and time.monotonic() < end:
        if os.path.exists({str(tmp_path / "heard")!r}) and os.path.getsize({str(tmp_path / "heard")!r}) >= 20:
            break
        time.sleep(0.01)
    """
    ended = launch(
        {"coordinator": toy(reads + OPEN + textwrap.dedent(waits)), "devices": toy(BEGIN + reads + keeps + dies_once)},
        {"coordinator": Path(os.devnull), "devices": Path(os.devnull)},
        lambda text: None,
        patience=QUICK,
        told={"devices": "a password"},
    )
    assert (ended.exit_code, (tmp_path / "heard").read_text()) == (0, "a password\na password\n")


def test_a_child_without_a_file_shares_stderr_and_nothing_else(capfd: pytest.CaptureFixture[str]) -> None:
    told = "print('for nobody', flush=True); print('for people', file=sys.stderr)"
    launch(
        {"coordinator": toy(OPEN + told), "devices": toy("")},
        {"coordinator": None, "devices": Path(os.devnull)},
        lambda text: None,
    )
    assert capfd.readouterr() == ("", "for people\n")


def test_a_signal_that_is_ignored_stays_ignored_and_all_mean_afterwards_what_they_meant_before() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    said: list[str] = []
    waking, woken = socket.socketpair()
    with waking, woken:
        waking.setblocking(False)
        before = [signal.getsignal(sign) for sign in signals], signal.set_wakeup_fd(waking.fileno())
        try:
            hangs_up = "import os, signal; os.kill(os.getppid(), signal.SIGHUP); raise SystemExit(3)"
            code, _ = run(OPEN + hangs_up, WAITS_FOR_SIGTERM, said)
        finally:
            wakes = signal.set_wakeup_fd(before[1])
        assert (code, said, wakes) == (3, [], waking.fileno())
    assert [signal.getsignal(sign) for sign in signals] == before[0]


LAUNCHER = """
import os, signal, sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which the tests may run, ignores it
from fedemu.ops.running import launch_rules
from fedemu.ops.running.launch import launch
from fedemu.ops.running.launch_rules import Patience
launch_rules.TOGETHER_SECONDS = 0.0
commands = {
    child: [sys.executable, "-c", code, str(os.getpid())]
    for child, code in zip(("coordinator", "devices"), sys.argv[1:], strict=True)
}
null = Path(os.devnull)
def started(pids):
    print(pids["coordinator"], pids["devices"], flush=True)
sys.exit(launch(commands, {"coordinator": null, "devices": null}, print, started, Patience(retreat=0.05)).exit_code)
"""


def start_launcher(coordinator: str, devices: str) -> tuple[subprocess.Popen[str], list[int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, coordinator, devices], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_reaches_the_coordinator_as_sigint(sign: signal.Signals) -> None:
    checkpoints = BEGIN + "signal.signal(signal.SIGINT, lambda *_: sys.exit(4))\n" + OPEN + WAIT
    process, pids = start_launcher(checkpoints, WAITS_FOR_SIGTERM)
    process.send_signal(sign)
    assert process.wait(timeout=60) == 4
    assert process.stdout is not None
    assert process.stdout.read() == "stopping after a checkpoint; once more to stop at once\n", "it is one request"
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_the_children_end_when_the_launcher_is_killed() -> None:
    process, pids = start_launcher(BEGIN + OPEN + WAIT, WAITS_FOR_SIGTERM)
    children = [psutil.Process(pid) for pid in pids]
    process.kill()
    process.wait(timeout=60)
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_a_free_address_lies_below_the_ports_that_the_system_gives_out_and_takes_no_draw_from_the_user() -> None:
    before = random.getstate()
    assert 20_000 <= int(free_address().rpartition(":")[2]) < 32_000
    assert random.getstate() == before


@pytest.mark.parametrize("port", ["0", "*"])
def test_devices_are_told_the_port_that_stands_for_any_free_one(port: str) -> None:
    for place in ("127.0.0.1", "[::1]", "*"):
        assert re.fullmatch(rf"tcp://{re.escape(place)}:[23]\d{{4}}", with_port(f"tcp://{place}:{port}"))
    for address in ("tcp://127.0.0.1:5577", "ipc://there:0", "tcp://127.0.0.1:10"):
        assert with_port(address) == address
