"""A process that has imported all of fedemu and forks commands of it, so that none of them imports torch anew.

``ops/stress/warm.py`` starts it as ``python -m fedemu.ops.stress.warm_process FD PARENT``. FD is the descriptor of its
end of the line, PARENT the process id of who started it. It has no thread when it forks, so forking is safe. A forked
command is a real process in a session of its own. It differs from one that a shell starts only in what it need not do:
neither it nor the processes that it starts in turn wait for an interpreter and its imports.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from fedemu.device.forking import Waiting
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.host.garbage import settle
from fedemu.protocol.host.kernel import end_with_parent, join_network, name_process

MESSAGE_BYTES = 2**18
"""The largest message on the line: arguments and an environment."""
TASKS = Path("/proc/self/task")
"""The threads of this process."""
MODULES: Mapping[str, Callable[[list[str]], Callable[[], object]]] = {
    "fedemu.ops.cli": lambda words: lambda: _module("fedemu.ops.cli.__main__").main(words),
    "fedemu.ops.running.child": lambda words: lambda: _module("fedemu.ops.running.child").main(words),
    "fedemu.device.process.zygote": lambda words: lambda: _module("fedemu.device.process.zygote").main(words),
    "fedemu.device.machine.prepare": lambda words: lambda: _module("fedemu.device.machine.prepare").main(words),
    "fedemu.device.compute.nursery": lambda words: lambda: _nurse(words),
}
"""What ``python -m MODULE`` does, by module: from its arguments to the function that does it."""
SPARE = {"device": 5, "run": 2, "sweep": 2, "fedemu-devices": 5, "fedemu-tree": 6}
"""How many processes a command, or a child of one, can start without an interpreter, by its name. Further ones get an
interpreter."""
ANSWER_SECONDS = 20.0
"""A blank process that does not answer for so long is left alone, and an interpreter is started instead."""
_IMPORTED = (
    *(name for name in MODULES if name != "fedemu.ops.cli"),
    "fedemu.device.compute.process",
    "fedemu.ops.cli.commands",
    "fedemu.ops.cli.__main__",
    "fedemu.ops.running.coordinator",
    "fedemu.ops.running.devices",
    "fedemu.ops.data.corpora",
)


class Commands:
    """Forks a command for every request on ``line``, and tells there when one has ended."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._seen: dict[int, bool] = {}  # process id -> whether the other side knows it, so that it may be reaped
        self._waiting = Waiting(line)

    def serve(self) -> None:
        """Obey until the other side closes the line, then kill all commands."""
        try:
            self._waiting.serve(self._hear, self._reap)
        finally:
            for pid in self._seen:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _hear(self) -> bool:
        content, descriptors, _, _ = socket.recv_fds(self._line, MESSAGE_BYTES, 1)
        if content:
            self._obey(json.loads(content), descriptors)
        return bool(content)

    def _obey(self, request: dict[str, Any], descriptors: list[int]) -> None:
        if "seen" in request:
            self._seen[request["seen"]] = True
            self._reap()
            return
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with_parent(parent)
            os.setsid()
            name_process("fedemu")
            self._line.send(json.dumps({"started": os.getpid()}).encode())
            self._waiting.leave()
            signal.signal(signal.SIGINT, signal.default_int_handler)
            _put({0: os.open(os.devnull, os.O_RDONLY), 1: descriptors[0], 2: os.dup(descriptors[0])})
            _open_streams()
            os.chdir(request["folder"])
            if request["network"] is not None:
                join_network(request["network"])
            words: list[str] = request["words"]
            _set_environment(request["environment"])
            _be(MODULES["fedemu.ops.cli"](words), SPARE.get(words[0], 0))
        for descriptor in descriptors:
            os.close(descriptor)
        self._seen[pid] = False

    def _reap(self) -> None:
        for pid in [pid for pid, seen in self._seen.items() if seen]:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._seen[pid]
                self._line.send(json.dumps({"ended": pid, "code": os.waitstatus_to_exitcode(status)}).encode())


class Blanks:
    """Processes that were forked early and wait for what they are to become. All read from one socket."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.settimeout(ANSWER_SECONDS)
        parent = os.getpid()
        for _ in range(count):
            if os.fork() == 0:
                self._ours.close()
                _wait_blank(theirs, parent)
        theirs.close()

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> int | None:
        """Make a blank process what the request says. Returns its process id, or None if there is no blank left."""
        if not self._left:
            return None
        self._left -= 1
        try:
            socket.send_fds(self._ours, [json.dumps(request).encode()], descriptors)
            return int(self._ours.recv(64))
        except (OSError, ValueError):
            self._left = 0
            return None


def _wait_blank(line: socket.socket, parent: int) -> NoReturn:
    end_with_parent(parent)
    name_process("fedemu-blank")
    try:
        content, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 32)
    except ConnectionError:  # the parent was killed before it had read which blank took its last request
        os._exit(0)
    if not content:
        os._exit(0)
    request = json.loads(content)
    if request["session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    line.send(str(os.getpid()).encode())
    line.close()
    _put(dict(zip(request["targets"], descriptors, strict=True)))
    _open_streams()
    name_process("python")
    _set_environment(request["environment"])
    if request["folder"] is not None:
        os.chdir(request["folder"])
    name = request["words"][1] if request["module"] == "fedemu.ops.running.child" else request["module"]
    _be(MODULES[request["module"]](request["words"]), SPARE.get(name, 0))


def _be(work: Callable[[], object], spare: int) -> NoReturn:
    """Do what this process is for, and end it as an interpreter ends."""
    code = 1
    try:
        if spare:
            start_from(Blanks(spare))
        result = work()
        code = result if isinstance(result, int) else 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)


def start_from(blanks: Blanks) -> None:
    """Make ``subprocess`` and asyncio take a blank process wherever they would start fedemu with an interpreter."""
    ordinary = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(self: subprocess.Popen[bytes], args: Any, *rest: Any) -> None:
        (executable, preexec, _, kept, folder, environment, _, _, shell, *pipes) = rest[:15]
        group = rest[-1]
        words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
        beginning = [*interpreter(), "-m"]
        known = not shell and preexec is None and executable is None and words[: len(beginning)] == beginning
        pid, words = None, words[len(beginning) :]
        if known and words[0] in MODULES:
            child_ends = {0: pipes[0], 1: pipes[3], 2: pipes[5]}
            places = {number: end for number, end in child_ends.items() if end != -1} | {fd: fd for fd in kept}
            request = {
                "module": words[0],
                "words": words[1:],
                "environment": dict(os.environ if environment is None else environment),
                "folder": None if folder is None else os.fspath(folder),
                "session": rest[-2],
                "group": group,
                "targets": list(places),
            }
            pid = blanks.start(request, list(places.values()))
        if pid is None:
            ordinary(self, args, *rest)
            return
        self.pid = pid
        self._child_created = True  # type: ignore[attr-defined]
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _put(descriptors: Mapping[int, int]) -> None:
    """Move open descriptors to the numbers that are the keys. Both may overlap."""
    high = {target: os.dup(os.dup2(found, 512 + target)) for target, found in descriptors.items()}
    for target, found in descriptors.items():
        os.close(found)
        os.close(512 + target)
    for target, found in high.items():
        if target != found:
            os.dup2(found, target)
    for found in set(high.values()) - set(high):
        os.close(found)


def _open_streams() -> None:
    """Open stdout and stderr anew. Those that were inherited take what the descriptors are now for what they were."""
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _nurse(words: list[str]) -> object:
    from fedemu.device.compute.nursery import run_nursery
    from fedemu.device.compute.process import open_runner

    return run_nursery(words, open_runner)


def main(words: list[str]) -> int:
    """Import everything, and serve. ``words`` are the descriptor of the line and the id of the process at its end."""
    descriptor, parent = map(int, words)
    end_with_parent(parent)
    name_process("fedemu-warm")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in _IMPORTED:
        importlib.import_module(name)
    if threads := len(os.listdir(TASKS)) - 1:
        raise RuntimeError(f"an import has started {threads} threads, beside which nothing may be forked")
    settle()
    with socket.socket(fileno=descriptor) as line:
        Commands(line).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
