"""The checkpoints of a run, from which it can continue after a round, and the checkpoints of its server jobs.

The checkpoint of a run is ``state-R.N.safetensors`` (every tensor of the algorithm's state) and ``record-R.json`` (the
state's outline, what the coordinator has to remember, and the checksum of the tensors). The round is durable when the
record has been renamed to its name and is on the disk. A process may be killed at any instant, and the power may fail.

The newest two checkpoints are kept. If a file of the newest one is damaged, the run goes on from the one before.
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
from safetensors.torch import load as deserialize
from safetensors.torch import save as serialize
from torch import Tensor

from fedemu.algorithms.interface import Tree
from fedemu.coordinator.record.outline import put_together, taken_apart
from fedemu.coordinator.record.records import DamagedError, read_record, record_name, recorded_rounds, write_record
from fedemu.protocol.code.named import SHOWN
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import PARTIAL, make_durable, named_failure, write_whole
from fedemu.protocol.host.paths import exists, is_folder
from fedemu.protocol.ids import Digest, digest_of

S = TypeVar("S")

_FORMATS = (1, 2)
"""The formats that can be read. Format 1 has no checksums. The last one is written."""
_KEPT = 2
"""The number of checkpoints that are kept."""
_STATE = re.compile(r"state-(\d+)\.\d+\.safetensors")
_JOB = re.compile(r"job-(\d+)\.\d+\.\d+\.(\d+)\.safetensors")


@dataclass(frozen=True)
class Loaded(Generic[S]):
    """A checkpoint that was loaded. The run goes on with round ``round + 1``.

    ``oldest`` is the round of the oldest checkpoint that is there. ``damage`` has a sentence for each newer checkpoint
    that could not be used.
    """

    round: int
    state: S
    record: dict[str, Any]
    oldest: int
    damage: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobState:
    """A server job after ``step`` steps. A ``finished`` job is not run again; its carry is the result."""

    step: int
    carry: Tree
    finished: bool


def save(directory: Path, round: int, state: Any, record: dict[str, Any]) -> None:
    """Make ``round`` durable. Then remove the jobs of rounds so far, and checkpoints older than the one before.

    ``state`` is the algorithm's frozen dataclass. ``record`` is anything that JSON holds exactly: keys are strings,
    numbers may be infinite. Raises FedemuError if the disk does not take it.
    """
    tensors: dict[str, Tensor] = {}
    outline = taken_apart(state, tensors)
    with named_failure(directory):
        make_durable(directory)
    # No durable record names this file, so saving a round again never harms the checkpoint that is there.
    name = next(name for n in range(1 << 30) if not exists(directory / (name := f"state-{round}.{n}.safetensors")))
    content = serialize(tensors)
    write_whole(directory / name, content, durable=True)
    document = {
        "format": _FORMATS[-1],
        "round": round,
        "tensors": name,
        "tensors_sha256": digest_of(content),
        "state": outline,
        "record": record,
    }
    write_record(directory, round, document)
    _drop_others(directory, round, name)


def load(directory: Path, example_state: S) -> Loaded[S] | None:
    """The newest checkpoint that is whole, None if there is none. ``example_state`` tells the types to build.

    Raises ConfigurationError if there are files but no checkpoint is whole, or if they belong to another kind of state.
    """
    damage: list[str] = []
    rounds = recorded_rounds(directory)
    for round in rounds:
        try:
            document, tensors = _read(directory, round)
        except DamagedError as error:
            damage.append(str(error))
            continue
        state = put_together(document["state"], tensors, example_state)
        return Loaded(round, state, document["record"], rounds[-1], tuple(damage))
    if damage:
        raise ConfigurationError(
            f"No checkpoint in {directory} can be read: {'; '.join(damage)}. Start the run anew in another folder."
        )
    return None


def require_data(loaded: Loaded[Any], now: Digest) -> None:
    """Raise ConfigurationError unless the run began with the data of this digest. Earlier versions kept none."""
    kept = loaded.record.get("data", now)
    if kept != now:
        raise ConfigurationError(
            f"The data, or what is frozen in the model, are not those with which this run began (digest "
            f"{kept[:SHOWN]}... then, {now[:SHOWN]}... now); go on in the folder in which it began if their name is a "
            "relative path, bring them back, or start a new run."
        )


def _read(directory: Path, round: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The record and the tensors of a checkpoint. Raises DamagedError if one of them is not what was written."""
    document = read_record(directory, round)
    if document.get("format") not in _FORMATS:
        raise ConfigurationError(
            f"The checkpoint in {directory} has format {document.get('format')} instead of {_FORMATS[-1]}; resume the "
            "run with the version of fedemu that wrote it."
        )
    path = directory / document["tensors"]
    try:
        content = path.read_bytes()
        if document.get("tensors_sha256", digest := digest_of(content)) != digest:
            raise DamagedError(f"{path} is damaged: its checksum is wrong")
        return document, _tensors(content)
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from error
    except (ValueError, safetensors.SafetensorError) as error:
        raise DamagedError(f"{path} is damaged: it is no file of tensors any more") from error


def save_job(
    directory: Path,
    round: int,
    ordinal: int,
    step: int,
    carry: Tree,
    *,
    finished: bool = False,
    attempt: int = 0,
    basis: str = "",
) -> None:
    """Keep a server job's carry after ``step`` steps, then remove earlier ones.

    ``basis`` names what the job began from.
    """
    with named_failure(directory):
        directory.mkdir(parents=True, exist_ok=True)
    older = _job_files(directory, round, attempt, ordinal)
    # Every step has a file name of its own, because some file systems wait for the disk when a file is replaced.
    path = directory / f"job-{round}.{attempt}.{ordinal}.{step}.safetensors"
    kept = canonical(carry, to="cpu")
    facts = {"step": step, "finished": finished, "names": list(carry), "sha256": _checksum(kept), "basis": basis}
    write_whole(path, serialize(dict(kept), metadata={"job": json.dumps(facts)}))
    for _, other in older:
        if other != path:
            other.unlink(missing_ok=True)


def load_job(
    directory: Path, round: int, ordinal: int, *, attempt: int = 0, basis: str | None = None
) -> JobState | None:
    """The newest state of one server job that is whole, None if there is none.

    A damaged state is passed over, because the job comes to the same end from any other. A state that has another
    ``basis`` is passed over too: an earlier life of the coordinator had other replies. None takes any basis.
    """
    for step, path in reversed(_job_files(directory, round, attempt, ordinal)):
        with contextlib.suppress(OSError, ValueError, KeyError, safetensors.SafetensorError):
            content = path.read_bytes()
            tensors, facts = _tensors(content), json.loads(_metadata(content)["job"])
            carry = {name: tensors[name] for name in facts["names"]}
            expected = {"step": step, "sha256": _checksum(carry)} | ({} if basis is None else {"basis": basis})
            if all(facts.get(name, value) == value for name, value in expected.items()):  # old files lack some facts
                return JobState(step, carry, facts["finished"])
    return None


def canonical(tree: Tree, to: str | None = None) -> Tree:
    """The tree in the form that a load gives back: detached, dense, each tensor in memory of its own.

    A load gives it back in host memory. Here each tensor stays on its device, or goes to the one that ``to`` names.
    """
    return {
        name: tensor.detach().to(to or tensor.device, copy=True, memory_format=torch.contiguous_format)
        for name, tensor in tree.items()
    }


def _checksum(tree: Tree) -> str:
    """The SHA-256 of the tensors' bytes, in the order of the tree."""
    parts = [leaf.contiguous().reshape(-1).view(torch.uint8).numpy().data for leaf in tree.values()]
    return digest_of(*parts)


def _job_files(directory: Path, round: int, attempt: int, ordinal: int) -> list[tuple[int, Path]]:
    """The files of one server job with their steps, ascending."""
    # A glob of each round would leave its pattern in the caches of Python.
    matches = map(_JOB.fullmatch, os.listdir(directory) if is_folder(directory) else ())
    beginning = f"job-{round}.{attempt}.{ordinal}."
    return sorted(
        (int(match[2]), directory / match[0]) for match in matches if match and match[0].startswith(beginning)
    )


def _tensors(content: bytes) -> dict[str, Tensor]:
    """The tensors of a file. Each lies in memory that torch aligns; offsets in a file are not aligned."""
    return {name: tensor.clone() for name, tensor in deserialize(content).items()}


def _metadata(content: bytes) -> dict[str, str]:
    """The metadata of a file. The library's ``safe_open`` tells them, too, but would lose memory with each tensor."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    found: dict[str, str] = header.get("__metadata__", {})
    return found


def _drop_others(directory: Path, round: int, tensors: str) -> None:
    """Remove all checkpoints but this one and the one before, each record before its tensors.

    So no record is ever without its tensors. Server jobs of a later round may be writing their files just now.
    """
    kept = [round, *(earlier for earlier in recorded_rounds(directory) if earlier < round)][:_KEPT]
    records = {record_name(each) for each in kept}
    names = os.listdir(directory)
    for name in sorted(names, key=lambda name: not name.startswith("record-")):
        whole = name.removesuffix(PARTIAL)
        if job := _JOB.fullmatch(whole):
            stale = int(job[1]) <= round
        elif state := _STATE.fullmatch(whole):
            stale = name != tensors and (name != whole or int(state[1]) == round or int(state[1]) not in kept)
        else:
            stale = name.startswith("record-") and name not in records
        if stale:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(directory / name)
