"""The checkpoint of a run, from which it can continue after a round, and the checkpoints of its server jobs.

The checkpoint of a run is ``state-R.N.safetensors`` (every tensor of the algorithm's state) and ``record-R.json`` (the
state's outline, and what the coordinator has to remember). The round is durable when the record has been renamed to its
name. A process may be killed at any instant. A loss of power is not covered, so nothing waits for the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import safetensors
import torch
from safetensors.torch import save as serialize
from torch import Tensor

from fedemu.algorithms.interface import Tree
from fedemu.coordinator.record.outline import put_together, taken_apart
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import PARTIAL, named_failure, write_whole

S = TypeVar("S")

_FORMAT = 1
_RECORD = re.compile(r"record-(\d+)\.json")
_JOB = re.compile(r"job-(\d+)\.\d+\.\d+\.(\d+)\.safetensors")


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """A checkpoint that was loaded. The run goes on with round ``round + 1``."""

    round: int
    state: S
    record: dict[str, Any]


@dataclass(frozen=True)
class JobState:
    """A server job after ``step`` steps. A ``finished`` job is not run again; its carry is the result."""

    step: int
    carry: Tree
    finished: bool


def save(directory: Path, round: int, state: Any, record: dict[str, Any]) -> None:
    """Make ``round`` durable, then remove older checkpoints and the jobs of rounds up to this one.

    ``state`` is the algorithm's frozen dataclass. ``record`` is anything that JSON holds exactly: keys are strings,
    numbers may be infinite. Raises FedemuError if the disk does not take it.
    """
    tensors: dict[str, Tensor] = {}
    outline = taken_apart(state, tensors)
    with named_failure(directory):
        directory.mkdir(parents=True, exist_ok=True)
    # No durable record names this file, so saving a round again never harms the checkpoint that is there.
    name = next(name for n in range(1 << 30) if not (directory / (name := f"state-{round}.{n}.safetensors")).exists())
    write_whole(directory / name, serialize(tensors))
    text = json.dumps({"format": _FORMAT, "round": round, "tensors": name, "state": outline, "record": record})
    write_whole(directory / f"record-{round}.json", text)
    _drop_others(directory, round, name)


def load(directory: Path, example_state: S) -> Loaded[S] | None:
    """The newest checkpoint, None if there is none. ``example_state`` tells the types to build.

    Raises ConfigurationError if there are files but none can be read, or if they belong to another kind of state.
    """
    rounds = sorted(_rounds(directory), reverse=True)
    for round in rounds:
        try:
            document = json.loads((directory / f"record-{round}.json").read_text())
            tensors = _read_tensors(directory / document["tensors"])[0]
        except (OSError, ValueError, KeyError, safetensors.SafetensorError):
            continue
        if document.get("format") != _FORMAT:
            raise ConfigurationError(
                f"The checkpoint in {directory} has format {document.get('format')} instead of {_FORMAT}."
            )
        return Loaded(round, put_together(document["state"], tensors, example_state), document["record"])
    if rounds:
        raise ConfigurationError(f"No checkpoint in {directory} can be read; start the run anew in another folder.")
    return None


def save_job(
    directory: Path, round: int, ordinal: int, step: int, carry: Tree, *, finished: bool = False, attempt: int = 0
) -> None:
    """Keep a server job's carry after ``step`` steps, then remove earlier ones."""
    with named_failure(directory):
        directory.mkdir(parents=True, exist_ok=True)
    older = _job_files(directory, round, attempt, ordinal)
    # Every step has a file name of its own, because some file systems wait for the disk when a file is replaced.
    path = directory / f"job-{round}.{attempt}.{ordinal}.{step}.safetensors"
    facts = {"step": step, "finished": finished, "names": list(carry)}
    write_whole(path, serialize(dict(canonical(carry)), metadata={"job": json.dumps(facts)}))
    for other in older:
        if other != path:
            other.unlink(missing_ok=True)


def load_job(directory: Path, round: int, ordinal: int, *, attempt: int = 0) -> JobState | None:
    """The newest state of one server job, None if there is none that can be read."""
    for path in reversed(_job_files(directory, round, attempt, ordinal)):
        with contextlib.suppress(OSError, safetensors.SafetensorError):
            tensors, metadata = _read_tensors(path)
            facts = json.loads(metadata["job"])
            return JobState(facts["step"], {name: tensors[name] for name in facts["names"]}, facts["finished"])
    return None


def canonical(tree: Tree) -> Tree:
    """The tree in the form that a load gives back: detached, dense, each tensor in memory of its own."""
    return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tree.items()}


def _job_files(directory: Path, round: int, attempt: int, ordinal: int) -> list[Path]:
    """The files of one server job, ascending by step."""
    names = directory.glob(f"job-{round}.{attempt}.{ordinal}.*.safetensors")
    steps = {int(match[2]): path for path in names if (match := _JOB.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps)]


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        # The clone lies in memory that torch aligns. Offsets in a mapped file are not aligned.
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _rounds(directory: Path) -> list[int]:
    if not directory.is_dir():
        return []
    return [int(match[1]) for name in os.listdir(directory) if (match := _RECORD.fullmatch(name))]


def _drop_others(directory: Path, round: int, tensors: str) -> None:
    """Remove all other checkpoints, each record before its tensors, so that no record is ever without them."""
    keep = {tensors, f"record-{round}.json"}
    names = os.listdir(directory)
    for name in sorted((name for name in names if name not in keep), key=lambda name: not _RECORD.fullmatch(name)):
        job = _JOB.fullmatch(name)
        stale = name.startswith(("state-", "record-")) or name.endswith(PARTIAL)
        if stale or (job is not None and int(job[1]) <= round):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / name)
