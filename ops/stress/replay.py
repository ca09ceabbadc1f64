"""The experiment that puts replay under stress, and what its devices then have on disk."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.device.memory.replay_buffer import split_own
from fedemu.device.memory.store import PREFIX, SUFFIX, read_own
from fedemu.ops.stress.scenarios import Scale
from fedemu.protocol.blobs.tree_file import decode_tree
from fedemu.protocol.errors import BlobError, DataError
from fedemu.protocol.ids import AskId

BUDGET = 6
EXCHANGES = (2, 4, 6)
"""The last rounds of all periods but the last, after which devices select."""
STEADY = Scale(
    experiment="digits-small",
    devices=16,
    overrides=(
        "fleet.devices=16",
        "fleet.start_timeout=120.0",
        "fleet.give_up=90.0",
        "liveness.heartbeat_seconds=1.0",
        "data.partition={kind='dirichlet', alpha=1.0, min_samples=20}",
        "model.hidden=[16]",
        "stream={kind='drift', periods=4, rounds_per_period=2, alpha=0.5}",
        f"replay={{strategy='coordinated', capacity={BUDGET}, iterations=3}}",
        "availability={kind='always'}",
        "faults.crash_rate=0.0",
    ),
    rounds=8,
    disturbances=0,
)
"""Coordinated selection at the ends of periods of drifting labels."""
CHURN = (
    "availability={kind='exponential', mean_online=120.0, mean_offline=60.0}",
    "profile.seconds_per_sample={kind='lognormal', median=0.1, sigma=0.5}",
    "fleet.deadline=120.0",
    "faults.crash_rate=0.1",
)
"""So much coming and going that devices miss exchanges, and drop out of them."""
ARRIVING = "stream={kind='drift', periods=4, rounds_per_period=2, alpha=0.5, arrivals='poisson', period_seconds=500.0}"
"""Samples arrive as the rounds go, and all periods but the first are waited for."""


def published_plan(directory: Path) -> StreamPlan:
    """What the devices of a run below the directory were told of the stream: one of the blobs they fetched."""
    for path in sorted(directory.rglob("blobs/*")):
        with suppress(BlobError, DataError):
            return StreamPlan.from_arrays(decode_tree(path))
    raise DataError(f"no device below {directory} has been told of a stream")


def newest_versions(directory: Path) -> dict[int, Path]:
    """Every device's newest version of its own state, wherever it lies below the directory."""
    newest: dict[int, tuple[AskId, Path]] = {}
    for path in directory.rglob(f"{PREFIX}*{SUFFIX}"):
        device, version = int(path.parent.name), version_of(path)
        if device not in newest or newest[device][0] < version:
            newest[device] = version, path
    return {device: path for device, (_, path) in sorted(newest.items())}


def version_of(path: Path) -> AskId:
    """The ask that made a version."""
    return AskId.parse(path.name.removeprefix(PREFIX).removesuffix(SUFFIX))


def buffers(directory: Path) -> dict[int, Buffer]:
    """Every device's replay buffer, by its newest version."""
    return {device: split_own(read_own(path))[1] for device, path in newest_versions(directory).items()}


def contents(directory: Path) -> dict[int, tuple[int, list[int], list[int]]]:
    """What every device has come to and keeps: the first period not selected from; its samples, and their periods."""
    return {
        device: (buffer.period, buffer.indices.tolist(), buffer.periods.tolist())
        for device, buffer in buffers(directory).items()
    }
