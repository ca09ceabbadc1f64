"""The exit codes: the numbers that other programs rely on, and what it costs to know them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedemu.ops.running.codes import CODES, IN_WORDS, INTERNAL_ERROR, INTERRUPTED, USAGE
from fedemu.protocol import errors

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"


def test_the_numbers_are_promised() -> None:
    assert (USAGE, errors.QuorumError.exit_code, INTERRUPTED, INTERNAL_ERROR) == (2, 3, 4, 5)


def test_the_help_and_the_page_name_the_codes_of_all_errors() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {str(kind.exit_code) for kind in kinds if issubclass(kind, errors.FedemuError)}
    # No error ends with 1: it is the code of a scenario that failed.
    assert codes | {"0", "1"} == {*re.findall(r"\d", IN_WORDS)} == {*re.findall(r"^ *(\d) ", CODES, re.MULTILINE)}
    assert codes <= {*re.findall(r"^\| (\d) \|", PAGE.read_text(), re.MULTILINE)}


def test_a_command_knows_the_codes_before_it_imports_anything_heavy() -> None:
    """Ctrl-C has to end a command quietly from its very first moment."""
    code = "import sys; from fedemu.ops.cli import __main__; print(*(name for name in sys.modules))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    names = ended.stdout.split()
    assert {"numpy", "pydantic", "typer", "rich", "zmq"}.isdisjoint(names)
    assert len([name for name in names if name.startswith("fedemu.")]) < 10


@pytest.mark.parametrize("sign", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_stop_signal_is_heard_at_once_while_asyncio_runs_and_once_if_it_comes_twice_together(sign: str) -> None:
    code = (
        "import asyncio, os, signal, sys, time\n"
        "from fedemu.ops.running.codes import interrupt_on_signals, leave_on_signals\n"
        "sign = signal.Signals[sys.argv[1]]\n"
        "signal.signal(sign, signal.SIG_DFL)\n"  # whoever started the tests may ignore it
        "leave_on_signals()\n"
        "interrupt_on_signals()\n"
        "async def put_together():\n"
        "    os.kill(os.getpid(), sign)\n"
        "    print('went on')\n"
        "try:\n"
        "    asyncio.run(put_together())\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted')\n"
        "os.kill(os.getpid(), sign)\n"
        "print('once')\n"
        "time.monotonic = lambda: 1e12\n"
        "try:\n"
        "    os.kill(os.getpid(), sign)\n"
        "except KeyboardInterrupt:\n"
        "    print('again')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, sign], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["interrupted", "once", "again"]


def test_the_collector_does_not_look_at_what_a_command_imports_at_its_beginning() -> None:
    code = (
        "import gc\n"
        "from fedemu.ops.running.codes import command_alone, leaving_at_once\n"
        "with leaving_at_once():\n"
        "    assert gc.isenabled(), 'such as in a notebook'\n"
        "assert not gc.get_freeze_count()\n"
        "command_alone()\n"
        "with leaving_at_once():\n"
        "    import decimal as imported\n"
        "    assert not gc.isenabled()\n"
        "with leaving_at_once():\n"
        "    later = []\n"
        "watched = {*map(id, gc.get_objects())}\n"
        "assert gc.isenabled() and id(vars(imported)) not in watched and id(later) in watched\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_a_process_does_not_wait_for_threads_that_were_abandoned() -> None:
    code = (
        "import threading\n"
        "from fedemu.ops.running.codes import command_alone, end, abandon_threads\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "assert not abandon_threads(), 'such as in a notebook'\n"
        "command_alone()\n"
        "assert abandon_threads()\n"
        "print('the last line')\n"
        "end(4)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (4, "the last line\n")


def test_a_signal_while_libraries_clean_up_at_the_end_changes_neither_the_code_nor_the_terminal() -> None:
    code = (
        "import atexit, os, signal, time\n"
        "from fedemu.ops.running.codes import end, interrupt_on_signals, keep_the_code, leave_on_signals\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "leave_on_signals()\n"
        "interrupt_on_signals()\n"
        "atexit.register(keep_the_code)\n"
        "atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(60)))\n"
        "print('the last line')\n"
        "end(3)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "the last line\n", "")


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("matplotlib", ["report", "run"]),
        ("matplotlib", ["compare", "run"]),
        ("torch", ["validate", "digits-small"]),
        ("torch", ["coordinator", "digits-small", "--out", "new"]),
        ("torch", ["run", "digits-small", "--transport", "memory", "--out", "new"]),
    ],
)
def test_a_stop_signal_while_compiled_modules_are_imported_ends_a_command_quietly(
    module: str, words: list[str], tmp_path: Path
) -> None:
    """Such a module makes an ImportError of the KeyboardInterrupt, and may break the interpreter, too."""
    (tmp_path / f"{module}.py").write_text(
        "import os, signal\n"
        "try:\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "except KeyboardInterrupt as error:\n"
        "    raise ImportError('initialization failed') from error\n"
    )
    command = [sys.executable, "-m", "fedemu.ops.cli", *words]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (INTERRUPTED, "fedemu: interrupted\n")
    assert not (tmp_path / "new").exists()
