"""The runs of a sweep as child processes, several at a time.

Every run is a child process with everything in one process, so runs side by side do not change each other's results.
One that computes on a GPU has further processes, and the GPU to itself if there is one for each.
The folder of the sweep shows what is left to do: a run that is complete is not run again, and one that has begun is
resumed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean

from fedemu.coordinator.record.run import read_summary
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import CONFIG_FILE, differences, read_frozen
from fedemu.ops.figures import percent, span
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.running.folder import clear_claim, holds_run
from fedemu.ops.running.launch import child_command
from fedemu.ops.running.words import is_over
from fedemu.ops.sweeps.plan import Planned
from fedemu.ops.terminal import COMPLAINT, last_words, say
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.host.starting import starting
from fedemu.protocol.wording import counted

Command = Callable[[Path, Planned], list[str]]
"""Makes the command of a run from its directory."""

TRANSPORT = "runtime.transport=memory"
"""What every run of a sweep is set to that computes on processors."""
APART = "runtime.transport=zmq"
"""What a run is set to that computes on a GPU. In the process that does so no server job could be started."""
PACKED = "runtime.per_process=50"
"""How such a run packs its devices, unless it is set to something else: it is one of several on this machine."""
_LOOK_EVERY = 0.2
"""Seconds between two looks at the runs under way."""


@dataclass(frozen=True)
class Failed:
    """A run that failed: its exit code, and its last words."""

    planned: Planned
    code: int
    words: str


@dataclass
class Progress:
    """How far a sweep has come. ``left`` are the runs that had to be run when it began, ``later`` how many follow."""

    left: Sequence[Planned]
    at_once: int
    later: int = 0
    began: float = field(default_factory=time.monotonic)
    took: list[tuple[Planned, float]] = field(default_factory=list)

    def line(self, run: Planned, seconds: float, result: str) -> str:
        """Note that a run has ended after so many seconds. Returns the line that tells people of it."""
        self.took.append((run, seconds))
        place = f"{len(self.took)} of {len(self.left)}"
        rest = f"; about {span(left)} left" if (left := self.seconds_left()) else ""
        return f"{place}: {run.folder} in {span(seconds)}: {result}{rest}"

    def seconds_left(self) -> float:
        """How long the rest will take, if runs of a part are alike, or as long as the plan says."""
        over = {run.folder for run, _ in self.took}
        waiting = [run for run in self.left if run.folder not in over]
        several = min(self.at_once, max(1, len(waiting) + self.later))
        known = [(run.seconds, seconds) for run, seconds in self.took if run.seconds]
        if known and all(run.seconds for run in waiting):
            scale = sum(seconds for _, seconds in known) / sum(expected for expected, _ in known)
            return scale * sum(run.seconds for run in waiting) / several
        mean = fmean(seconds for _, seconds in self.took)
        of_parts: dict[str, list[float]] = {}
        for run, seconds in self.took:
            of_parts.setdefault(run.part, []).append(seconds)
        alike = {part: fmean(seconds) for part, seconds in of_parts.items()}
        return (sum(alike.get(run.part, mean) for run in waiting) + mean * self.later) / several


def command_of(directory: Path, planned: Planned, on_gpu: bool = False) -> list[str]:
    """The command of a run: of a new one, or of one that goes on in its directory."""
    source = ["--resume", str(directory)] if holds_run(directory) else [planned.experiment, "--out", str(directory)]
    overrides = [*planned.overrides, f"seed={planned.seed}", APART if on_gpu else TRANSPORT, "runtime.report=false"]
    overrides = [PACKED, *overrides] if on_gpu else overrides
    settings = [word for override in overrides for word in ("--set", override)]
    return child_command("fedemu-run", "fedemu.ops.cli.__main__", "run", *source, *settings)


def play(
    folder: Path,
    runs: Sequence[Planned],
    progress: Progress,
    command: Command | None = None,
    gpus: Sequence[str] = (),
) -> list[Failed]:
    """Run these, as many at a time as the progress says, and tell a line of each. Returns those that failed.

    ``gpus`` are CUDA's names of the GPUs on which they compute. A run sees one of them, which the fewest others have. A
    run that fails does not end the others. KeyboardInterrupt is raised when all have stopped with a checkpoint.
    """
    command = command or partial(command_of, on_gpu=bool(gpus))
    waiting, failed = list(runs), list[Failed]()
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and len(running) < progress.at_once:
                planned = waiting.pop(0)
                gpu = min(gpus, key=[one.gpu for one in running].count, default=None)
                running.append(_start(folder / planned.folder, planned, command, gpu))
            time.sleep(_LOOK_EVERY)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                directory = folder / one.planned.folder
                result = _result(directory)
                if one.process.returncode:
                    # A run that was killed has a negative code, which no command ends with.
                    code = one.process.returncode if one.process.returncode > 0 else INTERRUPTED
                    said = last_words(_log_of(directory)).partition("\n")[0].removeprefix(COMPLAINT)
                    words = said or f"exit code {one.process.returncode}"
                    failed.append(Failed(one.planned, code, words))
                    result = f"failed: {words} (all its lines are in {_log_of(directory)})"
                say(progress.line(one.planned, time.monotonic() - one.began, result))
    except KeyboardInterrupt:
        _stop(running)
        raise
    finally:
        for one in running:
            one.process.kill()
    return failed


def told(failed: Sequence[Failed], runs: int) -> str:
    """The runs that failed, in words, one in a line."""
    lines = [f"  {one.planned.folder}: {one.words}" for one in failed]
    return "\n".join([f"{len(failed)} of {counted(runs, 'run')} failed; the same command tries them again:", *lines])


def has_nothing_left(directory: Path, wanted: Experiment | None = None) -> bool:
    """Whether the run of a directory is over. One that has not begun is not, nor is a damaged one.

    ``wanted`` is the experiment that is planned, which may have more rounds than the run has had.
    """
    if not is_file(directory / CONFIG_FILE):
        return False
    try:
        return is_over(directory, wanted or read_frozen(directory))
    except FedemuError:
        return False


def require_same(directory: Path, wanted: Experiment) -> None:
    """Raise ConfigurationError if a run has begun here as another experiment. It may get more rounds."""
    if not is_file(directory / CONFIG_FILE):
        return
    try:
        frozen = read_frozen(directory)
    except FedemuError:
        return  # the run tells it, and the others go on
    for path, old, new in differences(frozen.table(), wanted.table()):
        if path != "rounds" or new < old:
            raise ConfigurationError(
                f"{directory} is the run of another experiment: there {path} is {old}, and here {new}; "
                "choose another --out, or remove that folder"
            )
    if frozen.traces != wanted.traces:
        raise ConfigurationError(
            f"{directory} is the run of another experiment: its trace files had another content; choose another --out, "
            "or remove that folder"
        )


@dataclass
class _Running:
    """A run under way: what was planned, its process, when it began, and the only GPU that it sees. None: all."""

    planned: Planned
    process: subprocess.Popen[bytes]
    began: float
    gpu: str | None


def _start(directory: Path, planned: Planned, command: Command, gpu: str | None) -> _Running:
    """Start a run. Its lines for people go to the file ``seed-N.log`` beside its directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    clear_claim(directory)  # nobody else is claiming it, because this process holds the folder of the sweep
    words = command(directory, planned)
    environment = os.environ if gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    with _log_of(directory).open("wb") as log, starting():
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    return _Running(planned, process, time.monotonic(), gpu)


def _log_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.log")


def _result(directory: Path) -> str:
    """How a run ended, in words."""
    try:
        summary = read_summary(directory)
    except FedemuError as error:
        return str(error)
    accuracy = summary.get("final_accuracy")
    return f"{summary.get('outcome')}{'' if accuracy is None else f', accuracy {percent(accuracy)}'}"


def _stop(running: Sequence[_Running]) -> None:
    """Interrupt the runs, so that they keep a checkpoint, and wait for them. A second Ctrl-C does not wait."""
    say("stopping the runs under way")
    for one in running:
        with suppress(ProcessLookupError):
            # A sweep in the background of a shell, and so its runs, may be deaf to SIGINT.
            one.process.send_signal(signal.SIGTERM)
    with suppress(KeyboardInterrupt):
        for one in running:
            one.process.wait()
