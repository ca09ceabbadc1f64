"""The experiment that puts replay under stress, and readers of what its devices have on disk."""

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
"""The last rounds of all periods but the last. After each of them devices select."""
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
"""A stream of drifting labels, with coordinated selection at the end of each period."""
CHURN = (
    "availability={kind='exponential', mean_online=120.0, mean_offline=60.0}",
    "profile.seconds_per_sample={kind='lognormal', median=0.1, sigma=0.5}",
    "fleet.deadline=120.0",
    "faults.crash_rate=0.1",
)
"""Settings with so much churn that devices miss exchanges, and drop out of them."""
ARRIVING = "stream={kind='drift', periods=4, rounds_per_period=2, alpha=0.5, arrivals='poisson', period_seconds=500.0}"
"""A stream whose samples arrive while rounds go on, so that the run waits for each period but the first."""


def published_plan(directory: Path) -> StreamPlan:
    """The stream plan that the devices of a run got, from one of the blobs that they fetched.

    ``directory`` is searched with its subfolders. Raises DataError if no blob in it is a stream plan.
    """
    for path in sorted(directory.rglob("blobs/*")):
        with suppress(BlobError, DataError):
            return StreamPlan.from_arrays(decode_tree(path))
    raise DataError(f"no device below {directory} has a stream plan")


def newest_versions(directory: Path) -> dict[int, Path]:
    """The file with the newest version of each device's own state, by device, from ``directory`` and its subfolders."""
    newest: dict[int, tuple[AskId, Path]] = {}
    for path in directory.rglob(f"{PREFIX}*{SUFFIX}"):
        device, version = int(path.parent.name), version_of(path)
        if device not in newest or newest[device][0] < version:
            newest[device] = version, path
    return {device: path for device, (_, path) in sorted(newest.items())}


def version_of(path: Path) -> AskId:
    """The ask that made the version in this file."""
    return AskId.parse(path.name.removeprefix(PREFIX).removesuffix(SUFFIX))


def buffers(directory: Path) -> dict[int, Buffer]:
    """The replay buffer in the newest version of each device, by device."""
    return {device: split_own(read_own(path))[1] for device, path in newest_versions(directory).items()}


def contents(directory: Path) -> dict[int, tuple[int, list[int], list[int]]]:
    """The content of each device's replay buffer, by device.

    It is the first period that the device has not selected from, the samples that it keeps, and their periods.
    """
    return {
        device: (buffer.period, buffer.indices.tolist(), buffer.periods.tolist())
        for device, buffer in buffers(directory).items()
    }
