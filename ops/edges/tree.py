"""The machines of ``fedemu run`` with edges before them: one process that starts all edges and supervisors.

It is a child in the place of the one supervisor of a run without edges. Edges and supervisors that are killed are
started again, as the operators of their machines would do.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fedemu.device.host.processors import ask_for_cuda, default_trainers, parts_of_gpus, usable_gpus
from fedemu.ops.experiment import Runtime
from fedemu.ops.running.codes import INTERNAL_ERROR, STOP_SIGNALS
from fedemu.ops.running.devices import called
from fedemu.ops.running.exits import exit_code_of
from fedemu.ops.running.launch import DEVICES_OUTPUT, child_command
from fedemu.ops.terminal import last_words, say
from fedemu.protocol.host.private import private_folder
from fedemu.protocol.host.starting import starting
from fedemu.protocol.wording import ending

MOST_RESTARTS = 200
LOOK_SECONDS = 0.1
FAREWELL_SECONDS = 8.0
"""The time that edges and supervisors have to end after the first of them did so by itself."""


@dataclass
class Member:
    """An edge or a supervisor, and its process."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]
    restarts: int = 0

    @classmethod
    def start(cls, name: str, command: Sequence[str], environment: Mapping[str, str] = MappingProxyType({})) -> Member:
        """A member that runs, with these variables in addition."""
        return cls(name, command, environment, _started(command, environment))

    def end_of(self) -> int | None:
        """The code of a process that has ended. One that was killed is started again, and has not ended."""
        code = self.process.poll()
        if code is not None and code < 0 and self.restarts < MOST_RESTARTS:
            self.restarts += 1
            say(f"{self.name} {ending(code)}; starting it again")
            self.process = _started(self.command, self.environment)
            return None
        return code


def _started(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process. Raises ConfigurationError if this machine starts none."""
    with starting():
        return subprocess.Popen(command, env={**os.environ, **environment})


def plan(levels: Sequence[int], count: int, runtime: Runtime, state: Path, logs: Path, place: str) -> Iterator[Member]:
    """Start the edges, level by level from the top, and the supervisors of ``count`` devices behind the lowest ones.

    The supervisors divide trainers and GPUs among themselves. Each has one trainer at least.
    """
    above = [runtime.connect]
    keyless = {"keys": "", "server_key": "", "metrics_port": 0}
    for level, edges in enumerate(levels):
        addresses = [f"ipc://{place}/edge-{level}-{number}" for number in range(edges)]
        for number, address in enumerate(addresses):
            changes = {"connect": above[number * len(above) // edges], "bind": address, "metrics_port": 0}
            # Only the highest edges may reach an address with keys. Below them everything is in a private folder.
            own = runtime.model_copy(update=changes if level == 0 else keyless | changes)
            command = child_command("fedemu-edge", "fedemu.ops.edges.edge", own.model_dump_json())
            yield Member.start(f"edge {number + 1} of level {level + 1}", command)
        above = addresses
    machines = len(above)
    trainers = runtime.trainers or default_trainers(runtime.device_type)
    gpus = usable_gpus(runtime.device_type)
    parts = parts_of_gpus(gpus, machines) if gpus else [([], 1)] * machines
    for number, (address, (own_gpus, beside)) in enumerate(zip(above, parts, strict=True)):
        changes = keyless | {"connect": address, "trainers": max(1, _part(trainers, number, machines))}
        if number == 0:
            changes |= {"metrics_port": runtime.metrics_port}
        own = runtime.model_copy(update=changes)
        devices, folder = str(_part(count, number, machines)), str(logs / f"machine-{number + 1}")
        words = (devices, str(state), folder, own.model_dump_json(), "", str(beside))
        command = child_command("fedemu-devices", "fedemu.ops.running.devices", *words)
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(own_gpus)} if own_gpus else {}
        yield Member.start(f"machine {number + 1}", command, shown)


def _part(total: int, number: int, parts: int) -> int:
    """How much of ``total`` part ``number`` of so many gets, counted from 0. They differ by 1 at most."""
    return (number + 1) * total // parts - number * total // parts


def main(words: Sequence[str]) -> int:
    """Run the tree to its end.

    ``words`` are the levels as JSON, the number of devices, the folders of state and logs, the runtime as JSON, and the
    line on which devices are ``called``.
    """
    levels, count, state, logs, runtime, line = words

    def action() -> int:
        settings = Runtime.model_validate_json(runtime)
        if settings.device_type != "cpu":
            ask_for_cuda()  # the answer takes seconds
        asyncio.run(called(int(line)))
        stopping: list[int] = []
        for sign in STOP_SIGNALS:
            signal.signal(sign, lambda number, frame: stopping.append(number))
        with private_folder() as place:
            members = plan(json.loads(levels), int(count), settings, Path(state), Path(logs), str(place))
            return run_members(members, stopping, Path(logs) / DEVICES_OUTPUT)

    return exit_code_of(action)


def run_members(members: Iterable[Member], stopping: Sequence[int], output: Path) -> int:
    """Run members to their end, or until there is a signal in ``stopping``. The code is that of the first that failed.

    The members write to ``output``. What the one that failed has said is said again after the others have ended.
    """
    there: list[Member] = []
    words = ""
    try:
        for member in members:
            there.append(member)
        code = _watch(there, stopping)
        words = last_words(output) if code and not stopping else ""
    finally:
        _end(there)
    if words and words != last_words(output):
        say(words)
    return code


def _watch(members: Sequence[Member], stopping: Sequence[int]) -> int:
    """Wait until the members have ended. The code is that of the first that failed."""
    deadline = None
    while True:
        codes = [member.process.poll() if deadline else member.end_of() for member in members]
        failed = next((code for code in codes if code), 0)
        if failed < 0 and not deadline and not stopping:
            return INTERNAL_ERROR  # it was killed too often to be started again
        over = all(code is not None for code in codes) or (deadline is not None and time.monotonic() > deadline)
        if over or (deadline is None and (stopping or failed)):
            return max(failed, 0)
        if deadline is None and any(code == 0 for code in codes):
            deadline = time.monotonic() + FAREWELL_SECONDS
        time.sleep(LOOK_SECONDS)


def _end(members: Sequence[Member]) -> None:
    """End what is still there: kindly at first."""
    for member in members:
        if member.process.poll() is None:
            member.process.terminate()
    end = time.monotonic() + FAREWELL_SECONDS
    for member in members:
        with suppress(subprocess.TimeoutExpired):
            member.process.wait(max(0.1, end - time.monotonic()))
        if member.process.poll() is None:
            member.process.kill()
            member.process.wait()
