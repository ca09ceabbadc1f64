"""``fedemu run``: a coordinator and its devices on this machine, from the first sentence to the table at the end."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from fedemu.coordinator.record.run_directory import read_run
from fedemu.ops.cli.guarded import INTERNAL_ERROR, INTERRUPTED, exit_code_of
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.tables.stream import in_words
from fedemu.ops.results.results import Results
from fedemu.ops.running.folder import give_back
from fedemu.ops.running.launch import child_command, free_address, last_words, launch
from fedemu.ops.running.launch_rules import Child

_SHOW_CURSOR = "\x1b[?25h"
USAGE = 2


def say(text: str) -> None:
    """A line for people."""
    print(text, file=sys.stderr, flush=True)


def run_together(
    directory: Path,
    experiment: Experiment,
    runtime: Runtime,
    *,
    new: bool,
    print_summary: bool,
    heading: str | None = None,
) -> int:
    """Run to the end and say what came of it; returns the exit code. ``new``: the directory was claimed just now.

    ``heading`` is a line for people that is said once the run begins.
    """
    begins = title(experiment)
    if heading is not None:
        begins = f"{heading}\n{begins}"
    try:
        if runtime.transport == "memory":
            # torch is imported only by the process that computes; here that is this one.
            from fedemu.ops.running.coordinator import coordinate

            place = f"{begins}\n  everything in process {os.getpid()}\n  results      {directory}"
            code = exit_code_of(lambda: coordinate(directory, experiment, runtime, lambda: say(place)))
        else:
            code = _launch_both(directory, experiment, runtime, begins)
    except KeyboardInterrupt:
        code = INTERRUPTED
    return conclude(directory, code, "run", new=new, print_summary=print_summary)


def title(experiment: Experiment) -> str:
    """The first line of a run: what it is."""
    stream = experiment.stream
    periods = f"; {in_words(stream, experiment.rounds)}" if stream.period_count > 1 else ""
    return (
        f"{experiment.name}: {experiment.fleet.devices} devices, {experiment.rounds} rounds, seed {experiment.seed}"
        f"{periods}"
    )


def is_complete(directory: Path, experiment: Experiment) -> bool:
    """Whether there is nothing left to be done in a run that is to be resumed."""
    summary = read_run(directory).summary or {}
    return summary.get("outcome") == "completed" and summary.get("rounds") == experiment.rounds


def conclude(directory: Path, code: int, command: str, *, new: bool, print_summary: bool) -> int:
    """The last lines of a run; ``command`` is the one by which it was started and can be resumed."""
    if code == USAGE:
        if new:
            give_back(directory)
        return code
    results = Results.read(directory)
    if code == 0:
        say(results.to_text())
        if print_summary:
            print(results.to_json())
        return code
    if code == INTERRUPTED and results.summary.get("outcome") == "completed":
        say(results.to_text())
        say("interrupted after the last round, before the report was written; write it with")
        say(f"fedemu report {shlex.quote(str(directory))}")
        return code
    done = f"after round {results.rows[-1]['round']}" if results.rows else "before the first round"
    say(f"stopped {done}; its results so far are in {directory}; continue it with")
    say(f"fedemu {command} --resume {shlex.quote(str(directory))}")
    return code


def _launch_both(directory: Path, experiment: Experiment, runtime: Runtime, begins: str) -> int:
    chosen = runtime.bind if runtime.bind != Runtime().bind else free_address()
    runtime = runtime.model_copy(update={"bind": chosen, "connect": reachable(chosen)})
    logs = directory / "logs"
    devices_terminal = logs / "devices.out"
    serving = runtime.model_dump_json()
    # Each serves its metrics on a port of its own.
    training = runtime.model_copy(update={"metrics_port": runtime.metrics_port and runtime.metrics_port + 1})
    commands: dict[Child, list[str]] = {
        "coordinator": child_command("fedemu-coordinator", "fedemu.ops.running.coordinator", str(directory), serving),
        "devices": child_command(
            "fedemu-devices",
            "fedemu.ops.running.devices",
            str(experiment.fleet.devices),
            str(directory / "devices"),
            str(logs),
            training.model_dump_json(),
        ),
    }

    def started(pids: Mapping[Child, int]) -> None:
        say(
            f"{begins}\n"
            f"  coordinator  process {pids['coordinator']} at {chosen}\n"
            f"  devices      process {pids['devices']}, {per_process(runtime)}\n"
            f"  results      {directory}"
        )

    terminal = sys.stderr.isatty()

    def interject(text: str) -> None:
        # On a terminal the cursor rests at the end of the coordinator's display.
        say(f"\n{text}" if terminal else text)

    ended = launch(commands, {"coordinator": None, "devices": devices_terminal}, interject, started)
    if terminal:
        # A display that was killed could not do it.
        sys.stderr.write(_SHOW_CURSOR)
    if ended.devices_gave_up and (words := last_words(devices_terminal)):
        say(words)
    return INTERNAL_ERROR if ended.exit_code is None else ended.exit_code


def per_process(runtime: Runtime) -> str:
    """How the devices are packed, in words."""
    return "one process each" if runtime.per_process == 1 else f"{runtime.per_process} devices per process"


def reachable(bind: str) -> str:
    """The address by which this machine reaches what is bound: a wildcard host is loopback."""
    return bind.replace("//*:", "//127.0.0.1:").replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
