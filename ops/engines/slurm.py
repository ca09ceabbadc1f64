"""A run as a job of Slurm: the batch script in its run directory, and what it does in words."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Final

from fedemu.ops.assembly.named_code import allowing
from fedemu.ops.engines.places import require_places, settled_variables, share_in_words, variables
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.figures import span
from fedemu.ops.running.words import title
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import write_for_people
from fedemu.protocol.wording import counted

SCRIPT: Final = "job.sh"
NOTICE_SECONDS: Final = 180
"""The seconds before the time limit at which the run is stopped: more than a checkpoint and a farewell take."""
_TEMPLATE: Final = Path(__file__).parent / "shipped" / "slurm.sh"
_TIME: Final = re.compile(r"\d+|\d+:\d+|\d+:\d+:\d+|\d+-\d+(:\d+){0,2}")
_LEAST_MINUTES: Final = 2 * NOTICE_SECONDS / 60


@dataclass(frozen=True, kw_only=True)
class SlurmJob:
    """What a job asks of Slurm. ``time`` is a limit in Slurm's form. 0 ``cpus`` means whole nodes, without others.

    ``options`` are further options of sbatch, such as ``--constraint=haswell``.
    """

    nodes: int
    time: str
    cpus: int = 0
    gpus: int = 0
    partition: str = ""
    account: str = ""
    options: Sequence[str] = ()

    def check(self, experiment: Experiment, out: Path | None) -> None:
        """Raise ConfigurationError if Slurm could not read this, or if there are more nodes than devices."""
        require_places(experiment, self.nodes, "--nodes")
        run = str((out or Path()).absolute())
        if not run.isprintable() or '"' in run or "\\" in run:
            raise ConfigurationError(f"Slurm can't write its output into {run!r}; choose another folder with --out")
        if not _TIME.fullmatch(self.time):
            raise ConfigurationError(f"--time {self.time!r} is no time limit; write it as in 90, 4:00:00 or 2-12:00:00")
        if _minutes(self.time) < _LEAST_MINUTES:
            raise ConfigurationError(
                f"--time {self.time} is too short: the run is stopped {NOTICE_SECONDS} s before; "
                f"say at least {_LEAST_MINUTES:g} minutes"
            )
        for option, value in (("--partition", self.partition), ("--account", self.account)):
            if value and not re.fullmatch(r"[\w.,@/+-]+", value):
                raise ConfigurationError(f"{option} {value!r} is no name that Slurm knows; `sinfo` shows partitions")
        for option in self.options:
            if not re.fullmatch(r"--?[a-zA-Z][^\n\r]*", option) or not option.isprintable():
                raise ConfigurationError(
                    f"--sbatch {option!r} is no option; write it as in --sbatch=--constraint=gpu80"
                )

    def lines(self, name: str) -> str:
        """The lines at the top of the script that Slurm reads."""
        told = [
            f"--job-name={re.sub(r'[^A-Za-z0-9._-]', '_', name)}",
            f"--nodes={self.nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={self.cpus}" if self.cpus else "--exclusive",
            f"--time={self.time}",
        ]
        told += [f"--gpus-per-node={self.gpus}"] if self.gpus else []
        told += [f"--partition={self.partition}"] if self.partition else []
        told += [f"--account={self.account}"] if self.account else []
        return "\n".join(f"#SBATCH {option}" for option in (*told, *map(_quoted, self.options)))


def write_job(directory: Path, experiment: Experiment, runtime: Runtime, job: SlurmJob) -> Path:
    """Write the script of a job into a claimed run directory, and return its path."""
    run = directory.absolute()
    script = run / SCRIPT
    told = [f"export {name}={quote(value)}" for name, value in variables(runtime)]
    if settled := settled_variables():
        told.append(f"unset {' '.join(settled)} # the experiment is settled")
    words = {
        "TITLE": " ".join(title(experiment).split()),
        "NODES": counted(job.nodes, "node"),
        "SCRIPT": quote(str(script)),
        "OPTIONS": job.lines(experiment.name),
        "NOTICE": str(NOTICE_SECONDS),
        "LOG": f'"{str(run).replace("%", "%%")}/slurm-%j.out"',
        "FOLDER": quote(str(Path.cwd())),
        "VARIABLES": "\n".join(told),
        "PYTHON": quote(sys.executable),
        "RUN": quote(str(run)),
        "DEVICES": str(experiment.fleet.devices),
        # The first node has the coordinator, too, whose metrics have the port that was given.
        "METRICS": f" --metrics-port {runtime.metrics_port + 1}" if runtime.metrics_port else "",
        "ALLOWED": allowing(experiment),
    }
    text = re.sub(r"@([A-Z]+)@", lambda found: words[found[1]], _TEMPLATE.read_text(encoding="utf-8"))
    write_for_people(script, re.sub(r"\n{3,}", "\n\n", text))
    script.chmod(0o755)
    return script


def explained(directory: Path, experiment: Experiment, job: SlurmJob) -> str:
    """What a job will do, for the person who submits it."""
    each = share_in_words(experiment.fleet.devices, job.nodes)
    script = quote(str(directory / SCRIPT))
    return (
        f"{title(experiment)}\n"
        f"  submit   sbatch {script}\n"
        f"  nodes    {job.nodes}, each with {each} devices; the first one has the coordinator, too\n"
        f"  keys     made when the job begins, one for each node, in {directory / 'keys'}\n"
        f"  the end  {span(60 * _minutes(job.time))} are the limit; {NOTICE_SECONDS} s before, the run stops with a "
        "checkpoint and queues itself again\n"
        f"  again    submit the same script to go on after a failure or scancel\n"
        f"  results  {directory}, also the output of the job; `fedemu ls` and `fedemu watch` read it meanwhile"
    )


def submit(script: Path) -> str:
    """Give the script to sbatch, and return its answer. Raises ConfigurationError if it does not take it."""
    try:
        done = subprocess.run(["sbatch", str(script)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigurationError(
            "there is no sbatch on this machine; leave out --submit, and submit the script where Slurm is"
        ) from None
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise ConfigurationError(f"sbatch has not taken {script}: {said or f'exit code {done.returncode}'}")
    return done.stdout.strip()


def _quoted(option: str) -> str:
    """An option as sbatch reads it in a line of a script: it ends a value at a blank, and takes ``#`` for a comment.

    A value that has quotation marks or backslashes is left as it is: sbatch reads both, so its user has quoted it.
    """
    name, given, value = option.partition("=")
    if not given or not re.search(r"[ #]", value) or re.search(r"[\"'\\]", value):
        return option
    return f'{name}="{value}"'


def _minutes(time: str) -> float:
    """The minutes of a time limit: minutes, minutes:seconds, hours:minutes:seconds, or days-hours:minutes:seconds."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash or len(parts) == 3:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return 1440 * int(days or 0) + 60 * hours + minutes + seconds / 60
