"""What notebooks and scripts call: run an experiment, open a run, compare runs. ``fedemu`` hands these on.

``run`` does the same as the command ``fedemu run``, and ``compare`` the same as ``fedemu compare``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.compare import compare as side_by_side
from fedemu.ops.compare.text import text
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import NOT_SETTINGS, PREFIX, load_experiment, write_frozen
from fedemu.ops.experiment.toml_text import toml_text
from fedemu.ops.results.results import Results
from fedemu.ops.running.codes import USAGE
from fedemu.ops.running.exits import TOLD
from fedemu.ops.running.folder import claim, give_back
from fedemu.protocol.errors import ConfigurationError, FedemuError, Interrupted, UnreachableError
from fedemu.protocol.host.own_code import Told, retold

_STOP_PATIENCE = 60.0
"""The real seconds that an interrupted run may take to end."""
_WIDTH = 120
"""Characters that a cell of a notebook shows side by side."""
_BY_CODE: Mapping[int, type[FedemuError]] = {
    error.exit_code: error for error in (ConfigurationError, UnreachableError, Interrupted)
}


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path | None = None,
    *,
    out: Path | str | None = None,
    transport: Literal["zmq", "memory"] | None = None,
    progress: bool = True,
    **overrides: Any,
) -> Results:
    """Run an experiment on this machine, wait for its end, and return its results.

    ``experiment`` is the name of a preset, a TOML file, a table, or an ``Experiment``. Without it, it is ``digits``.
    ``out`` is the new run directory (``runs/NAME-N`` by default). Every other keyword overrides one setting, with two
    underscores for the dot. The run has processes of its own, so it does not matter whether an event loop runs here.
    ``progress`` shows their lines on stderr.

    Raises ConfigurationError, UnreachableError (also for a missed quorum) or Interrupted, like the exit codes 2, 3, 4.
    If somebody's own code failed, the error has the error of that code as its cause.

    >>> results = fedemu.run("digits-small", rounds=5, local__lr=0.05, out="gentle")
    >>> round(results.accuracy, 3)
    0.753
    """
    settings = [f"{key.replace('__', '.')}={_toml(value)}" for key, value in overrides.items()]
    if transport is not None:
        settings.append(f"runtime.transport={_toml(transport)}")
    checked, runtime = _load(experiment, settings)
    directory = claim(checked, Path(out) if out is not None else None)
    code, words, cause = _run(directory, runtime, progress)
    if code == 0:
        return Results.read(directory)
    if code == USAGE:
        give_back(directory)
    said = Told(words or f"the run ended with code {code}; see {directory / 'logs'}")
    raise retold(cause or said, _BY_CODE.get(code, FedemuError))


def open_run(directory: Path | str) -> Results:
    """Read what a run has written so far. An unfinished run has an empty ``summary``.

    Raises ConfigurationError if ``directory`` is no run directory.

    >>> round(fedemu.open_run("gentle").accuracy, 3)
    0.753
    """
    return Results.read(Path(directory))


@dataclass(frozen=True, repr=False)
class ComparedRuns:
    """Runs side by side. ``repr`` is the table that ``fedemu compare`` prints; ``comparison`` has the numbers."""

    comparison: Comparison

    def to_text(self, width: int = _WIDTH) -> str:
        """The tables for people, at most ``width`` characters wide: what is wider continues below."""
        return text(self.comparison, width)

    def to_json(self) -> str:
        """All figures, by row and by run, as ``fedemu compare --format json`` prints them."""
        return json.dumps(self.comparison.table(), allow_nan=False)

    def __repr__(self) -> str:
        return self.to_text()


def compare(*directories: Path | str, target: float | None = None, last: int = 100) -> ComparedRuns:
    """Put runs in one table. Runs that differ only by their seed are one row, with mean ± standard deviation.

    Each of ``directories`` is a run directory, or a folder of run directories. ``target`` is an accuracy between 0 and
    1, by default the best one of the first row; the rounds until 50, 75 and 95 % of it are counted. ``last`` is the
    number of last rounds over which an accuracy is the mean. Nothing is written.

    Raises ConfigurationError if one of them holds no run.

    >>> fedemu.compare("gentle", "plain", target=0.9)  # prints the table
    """
    return ComparedRuns(side_by_side(map(Path, directories), target, last))


def _load(
    experiment: Experiment | Mapping[str, Any] | str | Path | None, settings: list[str]
) -> tuple[Experiment, Runtime]:
    """Check an experiment with the overrides ``settings``. Raises ConfigurationError if something is wrong."""
    if experiment is None or isinstance(experiment, str | Path):
        return load_experiment(experiment, settings, os.environ)
    with tempfile.TemporaryDirectory(prefix="fedemu-") as folder:
        if isinstance(experiment, Experiment):
            write_frozen(experiment, Path(folder))
        else:
            (Path(folder) / "config.toml").write_text(toml_text(experiment), encoding="utf-8")
        # An experiment that was made in a program is complete. The environment only names the folders of data.
        return load_experiment(Path(folder) / "config.toml", settings, _no_settings(os.environ))


def _run(directory: Path, runtime: Runtime, progress: bool) -> tuple[int, str, Told | None]:
    """Run ``fedemu run`` in a claimed directory. Returns its exit code, its error, which may be empty, and its cause.

    The cause is None unless somebody's own code failed.
    """
    with tempfile.TemporaryDirectory(prefix="fedemu-") as folder:
        told = Path(folder) / "told.json"
        code, words = _play(directory, runtime, progress, told)
        if not told.exists():
            return code, words, None
        return code, words, Told(*json.loads(told.read_text(encoding="utf-8")))


def _play(directory: Path, runtime: Runtime, progress: bool, told: Path) -> tuple[int, str]:
    """Run ``fedemu run`` in a claimed directory, as ``_run`` does. An error of somebody's own code goes to ``told``."""
    command = [sys.executable, "-m", "fedemu.ops.cli", "run", "--resume", str(directory)]
    for key, value in runtime.model_dump().items():
        command += ["--set", f"runtime.{key}={_toml(value)}"]
    complaints: list[str] = []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=_no_settings(os.environ) | {TOLD: str(told)},
        # Ctrl-C must not reach the run directly, as it is passed on below.
        start_new_session=True,
    )
    assert process.stderr is not None
    reader = threading.Thread(target=_relay, args=(process.stderr, progress, complaints), daemon=True)
    reader.start()
    try:
        process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        reader.join()
        process.stderr.close()
    return process.returncode, complaints[-1] if complaints else ""


def _relay(lines: IO[str], progress: bool, complaints: list[str]) -> None:
    """Pass lines on to stderr if ``progress`` is to be shown, and keep the errors among them, with their own lines."""
    within = False
    for line in lines:
        if line.startswith("fedemu: "):
            complaints.append(line.removeprefix("fedemu: ").strip())
            within = True
        elif within := within and line.startswith("    "):
            complaints[-1] += f"\n{line.rstrip()}"
        if progress:
            print(line, end="", file=sys.stderr, flush=True)


def _no_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without settings of experiments. Variables that name folders stay."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX) or name in NOT_SETTINGS}


def _toml(value: Any) -> str:
    """A value as TOML. Tables are written inline."""
    return toml_text({"": {"v": str(value) if isinstance(value, Path) else value}}).partition("v = ")[2].strip()
