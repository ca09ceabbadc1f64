"""``fedemu sweep --on ray``: each run of a sweep on a slot of a Ray cluster, everything in one process there.

The process of this file stands for the run here. It hands the run directory to a node, and takes it back, also
if the sweep is interrupted.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from fedemu.coordinator.record.run_directory import remove_end
from fedemu.ops.engines.on_ray import connect
from fedemu.ops.experiment.sources import CONFIG_FILE, load_experiment, write_frozen
from fedemu.ops.running.exits import exit_code_of
from fedemu.ops.running.launch import child_command
from fedemu.ops.running.together import OWN_CLUSTER
from fedemu.ops.sweeps.plan import Planned
from fedemu.ops.sweeps.runs import command_of
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.host.files import PARTIAL, named_failure
from fedemu.protocol.host.paths import is_folder

_THERE = "run"
"""The name of the run directory at the node, in a temporary folder."""
_EXPERIMENT = "experiment"
"""The name of the folder with the experiment of a new run, beside it."""
_LOOK_SECONDS: Final = 0.2
"""The pause between two looks at a run. Ray's cancellation is heard after it, and does not end a longer wait."""


def slots(on: str) -> int:
    """Connect to the cluster, which all runs of the sweep use, and return how many runs fit: one on each core."""
    import ray

    connect(on)
    if os.environ.get("RAY_ADDRESS", "") in OWN_CLUSTER:  # each run would begin a cluster of its own
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
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
            handed = list(words[1:]), _pack(directory), _experiment(words[1:]), str(directory), os.getcwd()
            code, said, packed = _result(slot.remote(*handed))
        except ray.exceptions.RayError as error:
            raise FedemuError(f"the run was lost on the cluster ({' '.join(str(error).split())[:200]})") from error
        if packed:
            take_back(packed, directory)
        sys.stderr.write(said)
        return int(code)

    return exit_code_of(action)


def take_back(packed: bytes, directory: Path) -> None:
    """Make ``directory`` what ``packed`` says. Other files in it stay. Raises FedemuError if the system refuses.

    A kill leaves no cut file. A new directory comes whole. In another one the files are replaced in the order in which
    the run wrote them, so what is missing after a kill is what the run wrote last. The summary and the model that are
    here go first: they may be those of an earlier end, after which the run has gone on there.
    """
    coming = directory.with_name(f".{directory.name}{PARTIAL}")
    with named_failure(directory):
        shutil.rmtree(coming, ignore_errors=True)  # of a process that was killed
        try:
            _unpack(packed, coming)
            if not is_folder(directory):
                coming.rename(directory)
                return
            remove_end(directory)
            files = [path for path in coming.rglob("*") if not is_folder(path)]
            for path in sorted(files, key=lambda path: path.lstat().st_mtime_ns):
                place = directory / path.relative_to(coming)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
        finally:
            shutil.rmtree(coming, ignore_errors=True)


def _result(task: Any) -> tuple[int, str, bytes]:
    """What ``_play`` returns. On SIGTERM, by which a sweep stops its runs, the run there stops with a checkpoint."""
    import ray

    # Ray has set a handler of its own, which ends this process at once.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found: tuple[int, str, bytes] = ray.get(task)
    except KeyboardInterrupt:
        ray.cancel(task)
        try:
            found = ray.get(task)
        except ray.exceptions.TaskCancelledError:
            raise KeyboardInterrupt from None  # it had not begun
    return found


def _experiment(words: Sequence[str]) -> bytes:
    """The experiment of a new run, packed: the node need not have its file, nor the settings of this environment."""
    source, overrides = words[1], [word for option, word in pairwise(words) if option == "--set"]
    if source == "--resume":
        return b""
    with tempfile.TemporaryDirectory(prefix="fedemu-") as folder:
        write_frozen(load_experiment(source, overrides, os.environ)[0], Path(folder))
        return _pack(Path(folder))


def _play(words: list[str], packed: bytes, experiment: bytes, named: str, begun: str) -> tuple[int, str, bytes]:
    """Play a run at a node: its exit code, its lines for people, and its directory, which is ``named`` in these lines.

    It is played in the folder in which the sweep was ``begun``, if the node has it. Ray counts only a core for it, and
    hides no GPU of the node, which all runs there would share. So the run itself sees none.
    """
    with tempfile.TemporaryDirectory(prefix="fedemu-") as folder:
        there = Path(folder) / _THERE
        for content, place in ((packed, there), (experiment, Path(folder) / _EXPERIMENT)):
            if content:
                _unpack(content, place)
        command, *options = words
        if experiment:
            options[0] = str(Path(folder) / _EXPERIMENT / CONFIG_FILE)
        options = [str(there) if word == _THERE else word for word in options]
        said = Path(folder) / "said"
        with said.open("wb") as lines:
            process = subprocess.Popen(
                child_command("fedemu-run", "fedemu.ops.cli.__main__", command, *options),
                cwd=begun if is_folder(Path(begun)) else folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=lines,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
            code = _ended(process)
        return code, said.read_text(encoding="utf-8", errors="replace").replace(str(there), named), _pack(there)


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait for a run, and return its exit code. If Ray cancels the task, the run is stopped with a checkpoint."""
    try:
        while process.poll() is None:
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        process.terminate()
    return process.wait()


def _unpack(packed: bytes, folder: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")


def _pack(directory: Path) -> bytes:
    """A folder as an archive; empty if there is none."""
    if not is_folder(directory):
        return b""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(directory, ".")
    return packed.getvalue()
