"""A run of a sweep on a Ray cluster, both of its ends: Ray itself is scripted, and the run is a short program."""

from __future__ import annotations

import errno
import io
import json
import os
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedemu.ops.experiment.sources import CONFIG_FILE
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.sweeps import on_ray
from fedemu.protocol.errors import FedemuError

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedemu[ray]'")

RUN = """
import json, os, sys
from pathlib import Path
words = sys.argv[1:]
directory = Path(words[words.index("--resume" if "--resume" in words else "--out") + 1])
directory.mkdir(exist_ok=True)
seen = {"words": words, "cwd": os.getcwd(), "there": str(directory), "found": sorted(map(str, os.listdir(directory)))}
if "--resume" not in words:
    seen["experiment"] = Path(words[1]).read_text()
seen["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
(directory / "seen.json").write_text(json.dumps(seen))
print("not for people")
print(f"the report is in {directory}/report.html", file=sys.stderr)
sys.exit(3)
"""
"""A run that keeps what it has seen, tells people a line, and fails."""


def packed(**files: str) -> bytes:
    """An archive with these files."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name.replace("_", "."))
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return whole.getvalue()


def seen_in(archive: bytes) -> dict[str, Any]:
    """What ``RUN`` has kept in its directory."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        file = opened.extractfile("./seen.json")
        assert file is not None
        return dict(json.load(file))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are the program ``RUN``."""
    monkeypatch.setattr(on_ray, "child_command", lambda name, module, *words: [sys.executable, "-c", RUN, *words])


@pytest.mark.usefixtures("run")
def test_a_new_run_is_played_at_a_node_in_the_folder_of_the_sweep_and_tells_of_its_directory_here(
    tmp_path: Path,
) -> None:
    words = ["run", "mine.toml", "--out", "run", "--set", "seed=1"]
    experiment = packed(**{CONFIG_FILE.replace(".", "_"): "rounds = 3"})
    code, said, came = on_ray._play(words, b"", experiment, "sweep/seed-1", str(tmp_path))
    assert (code, said) == (3, "the report is in sweep/seed-1/report.html\n")
    seen = seen_in(came)
    assert (seen["cwd"], seen["found"], seen["experiment"]) == (str(tmp_path), [], "rounds = 3")
    assert seen["words"][2:] == ["--out", seen["there"], "--set", "seed=1"]
    assert not Path(seen["there"]).parent.exists()


@pytest.mark.usefixtures("run")
def test_a_run_goes_on_at_a_node_that_does_not_have_the_folder_of_the_sweep(tmp_path: Path) -> None:
    words = ["run", "--resume", "run", "--set", "seed=1"]
    code, _, came = on_ray._play(words, packed(metrics_jsonl=""), b"", "sweep/seed-1", str(tmp_path / "none"))
    seen = seen_in(came)
    assert (code, seen["found"]) == (3, ["metrics.jsonl"])
    assert seen["words"] == ["run", "--resume", seen["there"], "--set", "seed=1"]
    assert seen["cwd"] == str(Path(seen["there"]).parent)


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("node", [None, "0,1"])
def test_a_run_sees_no_gpu_of_its_node(node: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if node is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", node)
    _, _, came = on_ray._play(["run", "--resume", "run"], packed(metrics_jsonl=""), b"", "seed-1", str(tmp_path))
    assert seen_in(came)["gpus"] == ""
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == node, "other tasks of this process of Ray may have a GPU"


class Cluster:
    """What Ray answers to a run: ``answers`` are called one after another by those who wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[Callable[[], tuple[int, str, bytes]]] = []
        self.handed: tuple[Any, ...] = ()
        self.cancelled: list[str] = []
        monkeypatch.setattr(on_ray, "connect", lambda on: "127.0.0.1")
        slot = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._begin))
        monkeypatch.setattr(ray, "remote", lambda function: slot)
        monkeypatch.setattr(ray, "get", lambda task: self.answers.pop(0)())
        monkeypatch.setattr(ray, "cancel", self.cancelled.append)

    def _begin(self, *handed: Any) -> str:
        self.handed = handed
        return "task"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """A scripted cluster. The handler of SIGTERM is the one before in the end."""
    handler = signal.getsignal(signal.SIGTERM)
    yield Cluster(monkeypatch)
    signal.signal(signal.SIGTERM, handler)


def terminated() -> tuple[int, str, bytes]:
    """The sweep stops this run while it waits."""
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal was not heard")


def never_begun() -> tuple[int, str, bytes]:
    raise ray.exceptions.TaskCancelledError


def lost() -> tuple[int, str, bytes]:
    raise ray.exceptions.WorkerCrashedError


def test_a_run_that_goes_on_is_handed_to_the_cluster_and_taken_back_with_its_code_and_its_lines(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "seen.json").write_text('{"round": 1}')
    cluster.answers = [lambda: (3, "it failed\n", packed(seen_json='{"round": 2}'))]
    assert on_ray.main([str(tmp_path), "run", "--resume", "run"]) == 3
    words, directory, experiment, named, begun = cluster.handed
    assert (words, experiment) == (["run", "--resume", "run"], b"")
    assert (seen_in(directory), named, begun) == ({"round": 1}, str(tmp_path), os.getcwd())
    assert json.loads((tmp_path / "seen.json").read_text()) == {"round": 2}
    assert capsys.readouterr().err == "it failed\n"


def test_a_new_run_comes_whole_and_what_a_killed_process_left_beside_it_goes(tmp_path: Path) -> None:
    leftover = tmp_path / ".seed-1.partial"
    leftover.mkdir()
    (leftover / "old.json").touch()
    on_ray.take_back(packed(seen_json="{}"), tmp_path / "seed-1")
    assert [each.name for each in tmp_path.iterdir()] == ["seed-1"]
    assert [each.name for each in (tmp_path / "seed-1").iterdir()] == ["seen.json"]


def test_the_end_of_a_completed_run_is_gone_when_it_comes_back_from_further_rounds_without_one(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(f"rows {folder.name}")
    for name in ("summary.json", "model.safetensors", "notes.txt"):
        (here / name).write_text("here")
    on_ray.take_back(on_ray._pack(there), here)
    assert {file.name: file.read_text() for file in here.iterdir()} == {
        "metrics.jsonl": "rows there",
        "notes.txt": "here",
    }
    (there / "summary.json").write_text("end there")
    on_ray.take_back(on_ray._pack(there), here)
    assert (here / "summary.json").read_text() == "end there"


def test_files_come_back_in_the_order_in_which_they_were_written_and_never_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder, text in ((there, "new"), (here, "old")):
        (folder / "state").mkdir(parents=True)
        for second, name in enumerate(("state/b", "metrics", "a")):
            (folder / name).write_text(text)
            os.utime(folder / name, (second, second))
    (here / "state" / "b").chmod(0o444)
    replaced: list[str] = []

    def replace(path: Path, place: Path) -> None:
        if len(replaced) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        replaced.append(place.relative_to(here).as_posix())
        os.replace(path, place)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(FedemuError, match="the disk is full"):
        on_ray.take_back(on_ray._pack(there), here)
    assert replaced == ["state/b", "metrics"]
    assert [(here / name).read_text() for name in ("state/b", "metrics", "a")] == ["new", "new", "old"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["here", "there"]


def test_a_new_run_is_handed_to_the_cluster_with_its_experiment_as_it_is_set_here(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDEMU_LOCAL__LR", "0.02")
    cluster.answers = [lambda: (0, "", b"")]
    directory = tmp_path / "seed-1"
    assert on_ray.main([str(directory), "run", "digits-small", "--out", "run", "--set", "rounds=7"]) == 0
    _, there, experiment, _, _ = cluster.handed
    assert there == b""
    with tarfile.open(fileobj=io.BytesIO(experiment)) as archive:
        archive.extractall(tmp_path / "handed", filter="data")
    frozen = (tmp_path / "handed" / CONFIG_FILE).read_text().splitlines()
    assert {"rounds = 7", "lr = 0.02"} <= set(frozen)
    assert not directory.exists()


def test_a_run_that_its_sweep_stops_is_stopped_at_the_cluster_and_taken_back(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answers = [terminated, lambda: (INTERRUPTED, "", packed(seen_json='{"round": 2}'))]
    assert on_ray.main([str(tmp_path), "run", "--resume", "run"]) == INTERRUPTED
    assert cluster.cancelled == ["task"]
    assert json.loads((tmp_path / "seen.json").read_text()) == {"round": 2}
    cluster.answers = [terminated, never_begun]
    assert on_ray.main([str(tmp_path), "run", "--resume", "run"]) == INTERRUPTED
    assert capsys.readouterr().err == "fedemu: interrupted\n"


def test_a_run_that_the_cluster_has_lost_says_so(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.answers = [lost]
    assert on_ray.main([str(tmp_path), "run", "--resume", "run"]) == 5
    assert capsys.readouterr().err.startswith("fedemu: the run was lost on the cluster (The worker died unexpectedly")


@pytest.mark.parametrize(("resources", "runs"), [({"CPU": 3.0}, 3), ({}, 1), ({"CPU": 0.0}, 1)])
def test_one_run_fits_on_each_core_and_one_is_always_tried(
    resources: dict[str, float], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(monkeypatch, "10.1.0.4:6379", resources)
    assert on_ray.slots("ray") == runs


@pytest.mark.parametrize(
    ("given", "known"),
    [(None, "127.0.0.1:7"), ("", "127.0.0.1:7"), ("local", "127.0.0.1:7"), ("ray://there:10001", "ray://there:10001")],
)
def test_all_runs_of_a_sweep_find_the_cluster_that_it_has_found_or_begun(
    given: str | None, known: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(monkeypatch, given, {"CPU": 1.0})
    on_ray.slots("ray")
    assert os.environ["RAY_ADDRESS"] == known


def begun(monkeypatch: pytest.MonkeyPatch, given: str | None, resources: dict[str, float]) -> None:
    """Ray answers for a cluster at 127.0.0.1:7 with these resources, whatever RAY_ADDRESS was ``given``."""
    monkeypatch.setattr(on_ray, "connect", lambda on: "127.0.0.1")
    monkeypatch.setattr(ray, "cluster_resources", lambda: resources)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:7"))
    monkeypatch.setenv("RAY_ADDRESS", given or "")
    if given is None:
        monkeypatch.delenv("RAY_ADDRESS")
