"""``fedemu sweep --on ray``: each run of a sweep on a slot of a Ray cluster, everything in one process there.

The process of this file stands for the run here. It hands the run directory to a node, and takes it back.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedemu.ops.engines.on_ray import connect
from fedemu.ops.running.exits import exit_code_of
from fedemu.ops.running.launch import child_command
from fedemu.ops.sweeps.plan import Planned
from fedemu.ops.sweeps.runs import command_of
from fedemu.protocol.errors import FedemuError

_THERE = "run"
"""The name of the run directory at the node, in a temporary folder."""


def slots(on: str) -> int:
    """Connect to the cluster, which all runs of the sweep use, and return how many runs fit: one on each core."""
    import ray

    connect(on)
    os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def command_on_ray(directory: Path, planned: Planned) -> list[str]:
    """The command that stands here for a run on the cluster."""
    words = command_of(directory, planned)
    begins = words.index("run")
    words = [_THERE if word == str(directory) else word for word in words[begins:]]
    return child_command("fedemu-ray", "fedemu.ops.sweeps.on_ray", str(directory), *words)


def main(words: Sequence[str]) -> int:
    """One run on the cluster of RAY_ADDRESS. ``words`` are its directory here, and the words of ``fedemu`` there."""

    def action() -> int:
        import ray

        connect("ray")
        directory = Path(words[0])
        slot = ray.remote(_play).options(num_cpus=1, max_retries=3)
        try:
            code, said, packed = ray.get(slot.remote(list(words[1:]), _pack(directory)))
        except ray.exceptions.RayError as error:
            raise FedemuError(f"the run was lost on the cluster ({' '.join(str(error).split())[:200]})") from error
        if packed:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(directory, filter="data")
        sys.stderr.write(said)
        return int(code)

    return exit_code_of(action)


def _play(words: list[str], packed: bytes) -> tuple[int, str, bytes]:
    """Play a run at a node: its exit code, its lines for people, and its directory."""
    with tempfile.TemporaryDirectory(prefix="fedemu-") as folder:
        there = Path(folder) / _THERE
        if packed:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(there, filter="data")
        command = child_command("fedemu-run", "fedemu.ops.cli.__main__", *words)
        nobody = subprocess.DEVNULL
        ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, stdin=nobody)
        return ended.returncode, ended.stderr, _pack(there)


def _pack(directory: Path) -> bytes:
    """A folder as an archive; empty if there is none."""
    if not directory.is_dir():
        return b""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(directory, ".")
    return packed.getvalue()
