"""The lines that a run shows to people when it begins and when it ends."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

from fedemu.coordinator.record.run import read_summary
from fedemu.device.host.limits import pack_size
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.tables.stream import in_words
from fedemu.ops.figures import span
from fedemu.ops.results.results import Results
from fedemu.ops.running.codes import INTERNAL_ERROR, INTERRUPTED, USAGE
from fedemu.ops.running.folder import give_back, last_kept
from fedemu.ops.terminal import say
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import exists
from fedemu.protocol.wording import counted


def title(experiment: Experiment) -> str:
    """The first line of a run: its name, its devices, its rounds, its seed, its periods."""
    stream = experiment.stream
    periods = f"; {in_words(stream, experiment.rounds)}" if stream.period_count > 1 else ""
    return (
        f"{experiment.name}: {counted(experiment.fleet.devices, 'device')}, {counted(experiment.rounds, 'round')}, "
        f"seed {experiment.seed}"
        f"{periods}"
    )


def is_complete(directory: Path, experiment: Experiment) -> bool:
    """Whether a run has completed all rounds of its experiment, so that there is nothing to resume."""
    summary = read_summary(directory)
    return summary.get("outcome") == "completed" and summary.get("rounds") == experiment.rounds


def is_over(directory: Path, experiment: Experiment) -> bool:
    """Whether a run has nothing left to do: it is complete, or it diverged."""
    return read_summary(directory).get("outcome") == "diverged" or is_complete(directory, experiment)


def conclude(directory: Path, code: int, command: str, *, new: bool, print_summary: bool) -> int:
    """Show the last lines of a run, and return its exit code ``code``.

    ``command`` is the command that has started the run and can resume it. A ``new`` directory is given back if the
    experiment was wrong, unless rounds were played before that showed.
    """
    if code == USAGE and (not new or give_back(directory)):
        return code
    again = f"fedemu {command} --resume {shlex.quote(str(directory))}"
    try:
        results = Results.read(directory)
    except (ConfigurationError, OSError):
        if code == 0:
            raise
        # What has ended the run was told. It may hinder this, too, such as a disk that fails.
        if _is_gone(directory):
            say(f"stopped, because {directory} was moved or removed; if it was moved, continue it there with")
            say(f"fedemu {command} --resume DIR")
            return code
        say(f"stopped; its results so far are in {directory}, and cannot be read now; {_go_on(code)}")
        say(again)
        return code
    if code == 0:
        say(results.to_text())
        if print_summary:
            print(results.to_json())
        return code
    if code == INTERRUPTED and results.outcome == "completed":
        say(results.to_text())
        say("interrupted after the last round, before the report was written; write it with")
        say(f"fedemu report {shlex.quote(str(directory))}")
        return code
    if last := last_kept(directory):
        say(f"stopped after round {last}; its results so far are in {directory}; {_go_on(code)}")
    else:
        say(f"stopped before the end of the first round; {_go_on(code)}")
    say(again)
    return code


def _go_on(code: int) -> str:
    """What introduces the command that resumes a run. What was wrong or broken would end it again."""
    return "once that is mended, continue it with" if code in (USAGE, INTERNAL_ERROR) else "continue it with"


def _is_gone(directory: Path) -> bool:
    """Whether there is nothing at the place of a run any more. A folder at which nobody may look is there."""
    with suppress(OSError):
        return not exists(directory)
    return False


def at_address(command: str, runtime: Runtime) -> str:
    """The command that resumes a run at the addresses and places, and with the keys, that were named for it.

    A run in one process has none of them but its metrics.
    """
    words = [command]
    alone = runtime.transport == "memory" and command == "run"
    if alone:
        words += ["--transport", "memory"]
    if "bind" in runtime.model_fields_set and not alone:
        words += ["--bind", shlex.quote(runtime.bind)]
    if runtime.keys and not alone:
        words += ["--keys", shlex.quote(runtime.keys)]
    if runtime.on and not alone:
        words += ["--on", shlex.quote(runtime.on), *(["--nodes", str(runtime.nodes)] if runtime.nodes else [])]
    if runtime.metrics_port:
        named = "metrics_address" in runtime.model_fields_set
        words += ["--metrics-port", str(runtime.metrics_port)]
        words += ["--metrics-address", shlex.quote(runtime.metrics_address)] if named else []
    return " ".join([*words, "--insecure"] if runtime.insecure and not alone else words)


def processes(experiment: Experiment, runtime: Runtime) -> str:
    """How devices live in processes, in words."""
    if experiment.fleet.wake == "on-demand":
        return f"asleep until they are asked, then up to {pack_size(runtime.per_process)} in a process"
    return "one process each" if runtime.per_process == 1 else f"{runtime.per_process} devices per process"


def liveness_line(experiment: Experiment) -> str:
    """What people are told about signs of life. Nothing is told if they come as often as the experiment says."""
    liveness = experiment.liveness
    interval = liveness.interval(experiment.fleet.awake)
    if interval == liveness.heartbeat_seconds:
        return ""
    return (
        f"  liveness     a sign of life every {span(interval)} from each of so many devices; one is gone after "
        f"{span(interval * liveness.patience)} of silence (liveness.most_per_second)\n"
    )
