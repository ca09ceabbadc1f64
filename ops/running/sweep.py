"""``fedemu sweep``: runs a list of experiments and seeds, several at a time, and compares the runs of each part.

Every run is a child process with everything in one process, so runs side by side do not change each other's results.
The folder of the sweep shows what is left to do: a run that is complete is not run again, and one that has begun is
resumed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedemu.coordinator.record.run import read_run
from fedemu.ops.experiment.sources import CONFIG_FILE, read_frozen
from fedemu.ops.experiment.sweeps import Planned
from fedemu.ops.figures import counted, percent, span
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.running.launch import last_words
from fedemu.ops.running.words import is_complete, say

_LOOK_EVERY = 0.2
"""Seconds between two looks at the runs under way."""


@dataclass
class _Running:
    """A run under way: what was planned, its process, and when it began."""

    planned: Planned
    process: subprocess.Popen[bytes]
    began: float


def run_sweep(
    folder: Path,
    runs: Sequence[Planned],
    at_once: int,
    command: Callable[[Path, Planned], list[str]],
    resume: str,
) -> int:
    """Run what is left of ``runs``, at most ``at_once`` at a time, then compare each part. Returns the exit code.

    A run that fails does not end the others; the exit code is then that of the first one that failed. ``command`` makes
    the command of a run from its directory; ``resume`` is the command that goes on with the sweep, for people.
    """
    left = [run for run in runs if not _is_over(folder / run.folder)]
    say(
        f"sweep: {counted(len(runs), 'run')}, {len(runs) - len(left)} of them done already, "
        f"{at_once} at a time, in {folder}"
    )
    total, took, code, began = len(left), list[float](), 0, time.monotonic()
    running: list[_Running] = []
    try:
        while left or running:
            while left and len(running) < at_once:
                planned = left.pop(0)
                running.append(_start(folder / planned.folder, planned, command))
            time.sleep(_LOOK_EVERY)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                took.append(time.monotonic() - one.began)
                # A run that was killed has a negative code, which no command ends with.
                code = code or (one.process.returncode if one.process.returncode >= 0 else INTERRUPTED)
                pace = (time.monotonic() - began) / len(took)
                _say_ended(folder, one, took[-1], f"{len(took)} of {total}", pace * (total - len(took)))
    except KeyboardInterrupt:
        _stop(running)
        say(f"sweep interrupted; go on with what is left by\n{resume}")
        return INTERRUPTED
    finally:
        for one in running:
            one.process.kill()
    for part in dict.fromkeys(run.part for run in runs):
        _compare(folder / part)
    return code


def _is_over(directory: Path) -> bool:
    """Whether a run has nothing left to do: it is complete, or it diverged."""
    if not (directory / CONFIG_FILE).is_file():
        return False
    outcome = (read_run(directory).summary or {}).get("outcome")
    return outcome == "diverged" or is_complete(directory, read_frozen(directory))


def _start(directory: Path, planned: Planned, command: Callable[[Path, Planned], list[str]]) -> _Running:
    """Start a run. Its lines for people go to the file ``seed-N.log`` beside its directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _log_of(directory).open("wb") as log:
        process = subprocess.Popen(
            command(directory, planned), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    return _Running(planned, process, time.monotonic())


def _log_of(directory: Path) -> Path:
    return directory.with_name(f"{directory.name}.log")


def _say_ended(folder: Path, one: _Running, seconds: float, place: str, left: float) -> None:
    directory = folder / one.planned.folder
    if one.process.returncode:
        words = last_words(_log_of(directory)).removeprefix("fedemu: ") or f"exit code {one.process.returncode}"
        result = f"failed: {words} (all its lines are in {_log_of(directory)})"
    else:
        summary: Any = read_run(directory).summary or {}
        accuracy = summary.get("final_accuracy")
        result = f"{summary.get('outcome')}{'' if accuracy is None else f', accuracy {percent(accuracy)}'}"
    rest = f"; about {span(left)} left" if left else ""
    say(f"{place}: {one.planned.folder} in {span(seconds)}: {result}{rest}")


def _stop(running: Sequence[_Running]) -> None:
    """Interrupt the runs, so that they keep a checkpoint, and wait for them. A second Ctrl-C does not wait."""
    say("stopping the runs under way")
    for one in running:
        with suppress(ProcessLookupError):
            one.process.send_signal(signal.SIGINT)
    with suppress(KeyboardInterrupt):
        for one in running:
            one.process.wait()


def _compare(folder: Path) -> None:
    """Compare the runs in a folder, if any has a row."""
    from fedemu.ops.compare.compare import compare
    from fedemu.ops.compare.page.page import claim_folder, write_comparison
    from fedemu.ops.compare.text import text, width_of

    experiments = [
        path
        for path in sorted(folder.iterdir())
        if any((one / "metrics.jsonl").is_file() for one in path.glob("seed-*"))
    ]
    if not experiments:
        return
    comparison = compare(experiments)
    claim_folder(folder / "compare")
    page = write_comparison(comparison, folder / "compare")
    say(f"\n{folder.name}\n{text(comparison, width_of(sys.stderr.isatty()))}\nplots and numbers are in {page}")
