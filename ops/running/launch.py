"""Starts a coordinator and the devices of a machine as child processes, and sees both to their end.

``launch_rules.py`` makes the decisions. Here are the processes, the signals and the waiting. The children live in
sessions of their own, so Ctrl-C reaches only this process. They end if this process ends.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from signal import Signals
from types import FrameType

from fedemu.ops.running.codes import STOP_SIGNALS
from fedemu.ops.running.launch_rules import Action, CallDevices, Child, Launch, Patience, Say, Send, StartDevices
from fedemu.protocol.code.source import interpreter
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.starting import starting

DEFAULT_PATIENCE = Patience()
DEVICES_OUTPUT = "devices.out"
"""The file in a run's folder of logs that has the output of its devices."""
_LONGEST_SLEEP = 1.0
_FREE_PORTS = range(20_000, 32_000)
"""Ports below the range from which systems choose, so that no other process gets one before it is used."""
_PORT_TRIES = 200


def launch(
    commands: Mapping[Child, Sequence[str]],
    terminal: Mapping[Child, Path | None],
    say: Callable[[str], None],
    started: Callable[[Mapping[Child, int]], None] = lambda pids: None,
    patience: Patience = DEFAULT_PATIENCE,
    environment: Mapping[str, str] | None = None,
    told: Mapping[Child, str] | None = None,
) -> Launch:
    """Run both commands to their end. Returns the launch as it ended. Its ``exit_code`` is that of the run.

    Each child gets one more argument, the number of a descriptor. The coordinator has to ``announce`` itself there.
    Then the devices are ``called`` there, and ``started`` gets the process ids. ``terminal`` names the file for the
    output of a child; with None the child shares the stderr of this process. ``environment`` are variables that the
    children get beside those of this process. ``told`` is what a child reads from its stdin, which is empty otherwise:
    there are passwords, because everybody can read the command lines of processes. ``say`` gets lines for people. Must
    be called in the main thread, because it handles the stop signals meanwhile.
    """
    rules = Launch(patience)
    children = _Children(commands, terminal, dict(os.environ) | dict(environment or {}), told or {})
    with _signals() as (readable, received):
        try:
            line = children.start("coordinator")
            children.start("devices")
            watched: list[int | socket.socket] = [readable, line]
            awake: Sequence[int | socket.socket] = ()
            while rules.exit_code is None:
                actions: list[Action] = []
                for _ in received():
                    actions += rules.signalled(time.monotonic())
                for child, code in children.endings():
                    react = rules.coordinator_ended if child == "coordinator" else rules.devices_ended
                    actions += react(code, time.monotonic())
                if announced := line in awake:
                    watched.remove(line)
                    actions += rules.coordinator_opened() if line.recv(1) else []
                actions += rules.tick(time.monotonic())
                for action in actions:
                    match action:
                        case Say(text):
                            say(text)
                        case Send(child, sign):
                            children.send(child, sign)
                        case CallDevices():
                            children.call_devices()
                            started(children.pids)
                        case StartDevices():
                            children.start("devices")
                if announced:
                    line.close()  # the answer for which the coordinator waits
                awake = ()
                if rules.exit_code is None and not actions:
                    left = _LONGEST_SLEEP if rules.wake is None else max(0.0, rules.wake - time.monotonic())
                    awake, _, _ = select.select(watched, [], [], min(left, _LONGEST_SLEEP))
        finally:
            children.kill()
    return rules


class _Children:
    """The child processes of one launch."""

    def __init__(
        self,
        commands: Mapping[Child, Sequence[str]],
        terminal: Mapping[Child, Path | None],
        environment: Mapping[str, str],
        told: Mapping[Child, str],
    ) -> None:
        self._environment = environment
        self._told = told
        self._commands = commands
        self._terminal = terminal
        self._processes: dict[Child, subprocess.Popen[bytes]] = {}
        self._lines: dict[Child, socket.socket] = {}
        self._called = False
        self._ended: set[Child] = set()

    @property
    def pids(self) -> dict[Child, int]:
        """The process ids of all children that were started."""
        return {child: process.pid for child, process in self._processes.items()}

    def start(self, child: Child) -> socket.socket:
        """Start a child, or start it again. Returns the near end of its line.

        It inherits the far end, and its last argument is the number of that descriptor.
        """
        if child in self._lines:
            self._lines[child].close()
        self._lines[child], far_end = socket.socketpair()
        with far_end:
            command = [*self._commands[child], str(far_end.fileno())]
            process = _start(command, self._terminal[child], far_end.fileno(), self._environment)
        self._processes[child] = process
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin:  # it may have ended
            process.stdin.write(self._told.get(child, "").encode())
        self._ended.discard(child)
        if child == "devices" and self._called:
            self.call_devices()
        return self._lines[child]

    def call_devices(self) -> None:
        """Let the devices begin, and also those that are started again."""
        self._called = True
        with suppress(OSError):  # they have ended
            self._lines["devices"].send(b"!")

    def endings(self) -> list[tuple[Child, int]]:
        """The children that have ended since the last call, with their codes."""
        codes = [(child, process.poll()) for child, process in self._processes.items() if child not in self._ended]
        new = [(child, code) for child, code in codes if code is not None]
        self._ended.update(child for child, _ in new)
        return new

    def send(self, child: Child, sign: Signals) -> None:
        """Send a signal to a child that is still there."""
        if self._processes[child].poll() is None:
            self._processes[child].send_signal(sign)

    def kill(self) -> None:
        """Kill the children that are still there."""
        for line in self._lines.values():
            line.close()
        for child, process in self._processes.items():
            self.send(child, signal.SIGKILL)
            process.wait()


def child_command(name: str, module: str, *arguments: str) -> list[str]:
    """The command that runs ``module.main(arguments)`` in a child of this process, shown as ``name`` by ``ps``."""
    return [*interpreter(), "-m", "fedemu.ops.running.child", str(os.getpid()), name, module, *arguments]


def free_address() -> str:
    """A loopback address whose port is free now. Raises ConfigurationError if none is found.

    Programs that have seeded their generators alike get different ports.
    """
    for _ in range(_PORT_TRIES):
        port = secrets.choice(_FREE_PORTS)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"tcp://127.0.0.1:{port}"
    raise ConfigurationError("found no free port on 127.0.0.1; name one with --bind tcp://127.0.0.1:PORT")


def with_port(address: str) -> str:
    """The address with a free port in place of ``0`` or ``*``, so that it can be told to others."""
    place, _, port = address.rpartition(":")
    if not address.startswith("tcp://") or port not in ("0", "*"):
        return address
    return f"{place}:{free_address().rpartition(':')[2]}"


def _start(
    command: Sequence[str], terminal: Path | None, kept: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that inherits the descriptor ``kept``. Raises ConfigurationError if this machine starts none.

    The stop signals are blocked at first. ``begin_child`` unblocks them when the child can handle them.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        if terminal is not None:
            terminal.parent.mkdir(parents=True, exist_ok=True)
        with nullcontext() if terminal is None else terminal.open("ab") as file, starting():
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=file or subprocess.DEVNULL,
                stderr=file,
                pass_fds=(kept,),
                env=environment,
                start_new_session=True,
            )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _signals() -> Iterator[tuple[int, Callable[[], list[Signals]]]]:
    """Handle signals. Gives a descriptor that is readable after a signal, and a function.

    The function returns the stop signals that came since its last call.
    """
    pending: list[Signals] = []

    def remember(number: int, _: FrameType | None) -> None:
        if number != signal.SIGCHLD:
            pending.append(Signals(number))

    readable, writable = os.pipe()
    os.set_blocking(readable, False)
    os.set_blocking(writable, False)
    old_wakeup = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    # A signal that was ignored on purpose (nohup) stays ignored.
    wanted = [sign for sign in STOP_SIGNALS if signal.getsignal(sign) != signal.SIG_IGN]
    old = {sign: signal.signal(sign, remember) for sign in (*wanted, signal.SIGCHLD)}

    def received() -> list[Signals]:
        with suppress(BlockingIOError):
            while os.read(readable, 512):
                pass
        # Handlers run between any two steps: what comes after the count stays for the next call.
        return [pending.pop(0) for _ in range(len(pending))]

    try:
        yield readable, received
    finally:
        for sign, handler in old.items():
            signal.signal(sign, handler)
        signal.set_wakeup_fd(old_wakeup)
        os.close(readable)
        os.close(writable)
