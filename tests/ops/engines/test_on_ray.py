"""Runs on a Ray cluster of two nodes, which are processes here: one is removed, another comes, the digests stay."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from replay_fleet import STEADY

from fedemu.coordinator.record.json_lines import read_lines
from fedemu.coordinator.record.row import read_rows
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.engines import on_ray
from fedemu.ops.engines.actor import MOST_RESTARTS, Handed, Place, Report
from fedemu.ops.engines.nodes import settle
from fedemu.ops.engines.on_ray import RayFleet, bundle
from fedemu.ops.engines.sending import SentFile, folder_of
from fedemu.ops.experiment.printed import printed
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.keys.store import KeyFolder
from fedemu.ops.running.codes import INTERRUPTED
from fedemu.ops.running.folder import claim
from fedemu.ops.running.together import run_together
from fedemu.ops.stress.fleet import finished_rounds
from fedemu.protocol.errors import ConfigurationError, FedemuError, UnreachableError

SMALL = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
HEAD = SMALL | {"include_log_monitor": False, "no_monitor": True}
"""The head of the cluster has no process that collects logs, and none that asks a cloud for more nodes."""
LONGEST_SECONDS = 600.0
AT_HOME = {0: "a", 1: "b", 2: "c"}


def test_a_pair_of_keys_is_approved_that_a_killed_run_had_only_made(tmp_path: Path) -> None:
    public = KeyFolder(tmp_path / "place-1").new()
    files = on_ray._pair(tmp_path, 1)
    assert KeyFolder(tmp_path).approved() == {"place-1": public}
    assert on_ray._pair(tmp_path, 1) == files


def test_each_place_goes_to_the_node_that_is_kept_for_it() -> None:
    assert settle(dict.fromkeys(AT_HOME), AT_HOME, ["a", "b", "c"]) == AT_HOME
    assert settle(AT_HOME, AT_HOME, ["a", "b", "c"]) == {}


def test_a_place_whose_node_is_gone_shares_the_node_with_the_fewest_places() -> None:
    assert settle(AT_HOME, AT_HOME, ["a", "c"]) == {1: "a"}
    assert settle({0: "a", 1: "a", 2: "c"}, {0: "a", 2: "c"}, ["a"]) == {2: "a"}
    assert settle({0: "a", 1: "a", 2: "c"}, {0: "a", 2: "c"}, ["a", "c"]) == {}


def test_a_place_without_a_node_goes_to_one_that_has_returned_or_was_added() -> None:
    assert settle({0: "a", 1: "a", 2: "c"}, AT_HOME | {1: "new"}, ["a", "c", "new"]) == {1: "new"}
    assert settle({0: None, 1: None}, {}, []) == {}


def test_places_without_a_node_are_spread_and_one_that_goes_home_counts_there() -> None:
    assert settle({0: "a", 1: "gone", 2: "gone"}, {0: "b"}, ["b", "a"]) == {0: "b", 1: "a", 2: "b"}


def test_a_place_takes_the_cores_and_gpus_that_every_node_has_and_no_more_cores_than_trainers() -> None:
    nodes = [{"Resources": {"CPU": 8.0, "GPU": 2.0}}, {"Resources": {"CPU": 4.0, "GPU": 1.0}}]
    assert bundle(nodes, "auto") == {"CPU": 4.0, "GPU": 1.0}
    assert bundle(nodes, "cpu") == {"CPU": 4.0}
    assert bundle(nodes, "cpu", trainers=3) == {"CPU": 3.0}
    with pytest.raises(ConfigurationError, match=r"--trainers 5 is more than the cores .* \(4\)"):
        bundle(nodes, "cpu", trainers=5)
    with pytest.raises(ConfigurationError, match="not every node of the Ray cluster has a GPU"):
        bundle([*nodes, {"Resources": {"CPU": 4.0}}], "cuda")


class Starting(Place):
    """A place whose supervisor is not there yet when it has to leave its node, and is started then."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.looked = threading.Event(), threading.Event()
        self._state = self._logs = self._sent = folder
        self._command, self._private = (), ExitStack()
        self._stopped, self._restarts, self._started = False, 0, None
        patch.setattr("fedemu.ops.engines.actor.child_command", self._late)
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    @property
    def _process(self) -> Any:
        found = self._started
        self.looked.set()
        return found

    @_process.setter
    def _process(self, process: Any) -> None:
        self._started = process

    def _late(self, *words: str) -> list[str]:
        self.begun.set()
        self.looked.wait(10.0)
        return ["sleep", "20"]


def test_a_place_that_leaves_while_its_supervisor_is_started_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Starting(tmp_path, monkeypatch)
    assert place.begun.wait(10.0)
    began = time.monotonic()
    place.leave()
    assert time.monotonic() - began < 10.0


def test_a_place_whose_node_starts_no_process_has_ended_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    place = Place.__new__(Place)
    place._process, place._restarts, place._lacks_data, place._stopped = None, 0, False, False
    place._words, place._code, place._command, place._private = "", None, (), ExitStack()
    place._state = place._logs = place._sent = tmp_path
    place._thread = threading.Thread(target=place._keep)
    place._thread.start()
    place._thread.join()
    report = place.report()
    said = "fedemu: no supervisor can be started on this node: the limit of processes is reached; raise it (ulimit -u"
    assert (report.code, report.words.startswith(said)) == (5, True)


def test_a_place_whose_data_ray_has_lost_has_ended_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedemu[ray]'")

    def lost(reference: str) -> bytes:
        raise ray.exceptions.RayError("its owner died\nat a node")

    monkeypatch.setattr(ray, "get", lost)
    place = Place.__new__(Place)
    place._lacks_data, place._state, place._sent = True, tmp_path, tmp_path / "data"
    place.take_data([SentFile(name="x.npy", sha256="", blobs=("blob",))])
    report = place.report()
    assert (report.code, report.words) == (5, "fedemu: the data did not come: RayError: its owner died")


DIED_IN_INIT = """The actor died because of an error raised in its creation task, ray::Place.__init__() (pid=7)
  File "actor.py", line 83, in __init__
    self._logs.mkdir(parents=True, exist_ok=True)
OSError: [Errno 28] No space left on device: '/tmp/fedemu-0'
"""
DIED_WITH_ITS_NODE = """The actor died unexpectedly before finishing this task.
	class_name: Place
The actor is dead because its node has died.
The actor never ran - it was cancelled before it started running.
"""


class Lonely(RayFleet):
    """A fleet of one place. What Ray says of its actor is given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedemu[ray]'")
        self._patch = monkeypatch
        self._handed = {0: Handed(place=0, count=1, run="run", runtime={}, keys={}, experiment=b"", data="", leases={})}
        self._at, self._asked, self._heard, self._silent, self._codes = {0: "a"}, {0: "report"}, {0: 0.0}, {0: 0}, {}
        monkeypatch.setattr(self._ray, "wait", lambda references, **_: (references, []))
        monkeypatch.setattr(on_ray, "LOOK_SECONDS", 0.0)

    def hear(self, answer: Report | str | OSError) -> None:
        """Put the place on its node, and look: it reports, its actor is dead with these words, or its report failed."""

        def get(reference: str) -> Report:
            match answer:
                case Report():
                    return answer
                case str():
                    raise self._ray.exceptions.RayActorError(error_msg=answer)
                case error:
                    words = f"{type(error).__name__}: {error}"
                    raise self._ray.exceptions.RayTaskError("report", words, error).as_instanceof_cause()

        self._at[0], self._asked[0] = "a", "report"
        self._actors = {0: SimpleNamespace(report=SimpleNamespace(remote=lambda: "report"))}
        self._patch.setattr(self._ray, "get", get)
        self._look(["a"])


@pytest.mark.parametrize("found", [True, False])
def test_signals_are_heard_as_before_when_ray_was_asked_for_its_cluster(
    found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedemu[ray]'")

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        if not found:
            raise ConnectionError("nobody there")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(ray, "nodes", list)
    heard: list[int] = []

    def hear(number: int, frame: object) -> None:
        heard.append(number)

    former = signal.signal(signal.SIGTERM, hear)
    try:
        if found:
            assert on_ray.connect("ray") == "127.0.0.1"
        else:
            with pytest.raises(UnreachableError, match="no Ray cluster answers at this machine"):
                on_ray.connect("ray")
        assert signal.getsignal(signal.SIGTERM) is hear
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_place_that_can_never_begin_ends_the_run_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Lonely(monkeypatch)
    for _ in range(MOST_RESTARTS):
        fleet.hear(DIED_IN_INIT)
    assert capsys.readouterr().err.count("(OSError: [Errno 28] No space left on device: ") == MOST_RESTARTS
    with pytest.raises(
        FedemuError, match=r"place 0 was lost 6 times before it was heard of \(OSError: .* No space left"
    ):
        fleet.hear(DIED_IN_INIT)


def test_a_place_that_is_lost_now_and_then_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Lonely(monkeypatch)
    for _ in range(2 * MOST_RESTARTS):
        fleet.hear(DIED_WITH_ITS_NODE)
        fleet.hear(Report(code=None, leases={}, words=""))
    assert (
        "place 0 is lost with its node, or its process (The actor is dead because its node has died.)"
        in capsys.readouterr().err
    )


def test_a_place_whose_report_fails_is_made_anew_and_ends_the_run_with_the_reason_if_it_goes_on_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Lonely(monkeypatch)
    for _ in range(MOST_RESTARTS):
        fleet.hear(OSError(5, "Input/output error"))
    assert capsys.readouterr().err.count("place 0 is lost with its node, or its process (OSError: [Errno 5] ") == 5
    with pytest.raises(FedemuError, match=r"place 0 was lost 6 times before it was heard of \(OSError: \[Errno 5\]"):
        fleet.hear(OSError(5, "Input/output error"))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of Ray on the loopback interface."""
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'fedemu[ray]'")
    handler = signal.getsignal(signal.SIGTERM)
    made = utils.Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        made.add_node(**SMALL)
        yield made
    finally:
        made.shutdown()
        signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)


SETTINGS = (
    *STEADY.settings,
    "rounds=6",
    "fleet.per_round=16",
    "fleet.wake=on-demand",
    "data.dataset=own.csv",
    # Each round asks every device, so no round can end without a node.
    "fleet.over_selection=1.0",
    "faults.crash_rate=0.05",
    "availability={kind='always'}",
)
"""Devices that have states of their own, coordinated replay, and a data set that is found only where the run is."""


def own_data(folder: Path) -> Path:
    """A file with 960 samples of three classes, which only a process in ``folder`` finds.

    Nodes keep one copy of the same data. One value is that of this process, so that tests beside it keep another.
    """
    random = np.random.default_rng(0)
    label = np.arange(960) % 3
    table = np.column_stack([random.normal(label[:, None], 1.0, (len(label), 4)), label])
    table[0, 0] = os.getpid() / 1e6
    np.savetxt(folder / "own.csv", table, "%.6f", ",", header="a,b,c,d,label", comments="")
    return folder


def forget_sent(folder: Path) -> None:
    """Remove the data of ``own_data`` where a node keeps what it was sent."""
    experiment, _ = load_experiment("digits-small", [f"data.dataset={folder}/own.csv"], {})
    shutil.rmtree(folder_of(open_corpus(experiment).digest), ignore_errors=True)


class OnRay:
    """A run on the nodes of a cluster. Its coordinator can be held, so that the run waits while the cluster changes."""

    def __init__(self, address: str, folder: Path) -> None:
        self.folder = folder
        self._log = folder / "log"
        self._held: psutil.Process | None = None
        self._deadline = time.monotonic() + LONGEST_SECONDS
        chosen = [
            *SETTINGS,
            "runtime.per_process=4",
            "runtime.report=false",
            f"runtime.shared_state={folder / 'state'}",
        ]
        words = ["run", "digits-small", *(word for one in chosen for word in ("--set", one))]
        with self._log.open("wb") as output:
            self.process = psutil.Popen(
                [sys.executable, "-m", "fedemu", *words, "--on", "ray", "--trainers", "1", "--out", "run"],
                cwd=folder,
                env=os.environ | {"RAY_ADDRESS": address},
                stdout=output,
                stderr=output,
            )

    @property
    def told(self) -> str:
        """What the run has said so far, and what it has said of its places."""
        places = self.folder / "run" / "logs" / "devices.out"
        return self._log.read_text() + (places.read_text() if places.exists() else "")

    def check(self) -> None:
        """Fail if the run has ended, or if it takes too long."""
        assert self.process.poll() is None, self.told
        assert time.monotonic() < self._deadline, self.told

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true of a run that goes on."""
        while not condition():
            self.check()
            time.sleep(0.05)

    @property
    def rounds(self) -> int:
        """How many rounds are over."""
        return finished_rounds(self.folder / "run")

    def hold(self) -> None:
        """Stop the coordinator."""
        [self._held] = [each for each in self.process.children() if each.name().startswith("fedemu-coordin")]
        self._held.suspend()

    def go_on(self) -> None:
        """Let the coordinator go on."""
        if self._held is not None:
            self._held.resume()
            self._held = None

    def summary(self) -> dict[str, Any]:
        """The summary of the run, which has to end with exit code 0."""
        assert self.process.wait(LONGEST_SECONDS) == 0, self.told
        return dict(json.loads((self.folder / "run" / "summary.json").read_text()))

    def close(self) -> None:
        """End the run if it still goes on."""
        if self.process.is_running():
            self.go_on()
            self.process.terminate()
        self.process.wait(LONGEST_SECONDS)

    def hold_after_a_round(self) -> None:
        """Let the run go on, and hold it as soon as one more of its rounds is over."""
        rounds = self.rounds
        self.go_on()
        self.until(lambda: self.rounds > rounds)
        self.hold()


@pytest.fixture(scope="module")
def shaken(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    """A run on two nodes. One of them is removed in the middle of a round, then another comes."""
    folder = own_data(tmp_path_factory.mktemp("on-ray"))
    forget_sent(folder)
    run = OnRay(cluster.address, folder)
    try:
        run.hold_after_a_round()
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        run.until(lambda: "is lost with its node, or its process" in run.told)
        run.hold_after_a_round()
        cluster.add_node(**SMALL)
        run.until(lambda: "goes to the node that is kept for it" in run.told)
        run.go_on()
        yield run
    finally:
        run.close()
        forget_sent(folder)


@pytest.mark.timeout(900)
def test_a_run_that_loses_a_node_in_a_round_and_gets_another_has_the_digest_of_a_run_alone(
    shaken: OnRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shaken.folder)
    summary = shaken.summary()
    assert "2 places on 2 nodes of Ray" in shaken.told
    assert "has no copy of the data; " in shaken.told
    settings = [*SETTINGS, "fleet.wake=at-once", "runtime.transport=memory", "runtime.report=false"]
    experiment, runtime = load_experiment("digits-small", settings, {})
    alone = claim(experiment, tmp_path / "alone")
    assert run_together(alone, experiment, runtime, new=True, print_summary=False) == 0
    assert summary["model_digest"] == json.loads((alone / "summary.json").read_text())["model_digest"]
    assert not summary["perturbed"]
    # A round is over some time before its row is there. So a quick run may have been held a round later.
    assert _rounds_of_arrivals(shaken.folder / "run") - {1}, "no place came back within a round"


@pytest.mark.timeout(900)
def test_secret_keys_are_nowhere_but_in_the_keys_of_the_run(shaken: OnRay, cluster: Any) -> None:
    session = Path(cluster.head_node.get_session_dir_path())
    shaken.summary()
    keys = shaken.folder / "run" / "keys"
    secrets = [KeyFolder(place).pair()[1].encode() for place in [keys, *keys.glob("place-*")]]
    assert len(secrets) == 3
    for folder in (shaken.folder, session / "logs"):
        for path in folder.rglob("*"):
            if path.is_file() and keys not in path.parents:
                assert not any(secret in path.read_bytes() for secret in secrets), path
    assert {path.stat().st_mode & 0o077 for path in keys.rglob("*_secret")} == {0}


def _rounds_of_arrivals(directory: Path) -> set[int]:
    """The rounds within which a machine has enrolled again."""
    rows = read_rows(directory)
    enrolled = [event["wall_time"] for event in read_lines(directory / "events.jsonl") if event["event"] == "enroll"]
    return {row.round for row in rows for at in enrolled if row.wall_time - row.round_seconds < at < row.wall_time}


HELD_UP = """
import time
from pathlib import Path
from torch import nn

SIGN = Path({sign!r})


class HeldUp(nn.Module):
    def __init__(self, input_shape, classes):
        super().__init__()
        self.top = nn.Linear(64, classes)

    def forward(self, x):
        time.sleep(0.005 if SIGN.exists() else 0)
        logits = self.top(x.flatten(1))
        return logits if logits.sum().item() > 0 else logits * 1  # so its steps are not recorded, and each one waits
"""
"""A model that is slow while a file is there. The bits of its results don't depend on that."""


@pytest.mark.timeout(900)
def test_a_sweep_on_ray_that_is_interrupted_brings_its_runs_back_and_goes_on(cluster: Any, tmp_path: Path) -> None:
    name = f"interrupted-{os.getpid()}"
    (tmp_path / "mine.toml").write_text(printed("digits-small"))
    slow, model = tmp_path / "slow", tmp_path / "held_up.py"
    slow.touch()
    model.write_text(HELD_UP.format(sign=str(slow)))
    words = ["sweep", "mine.toml", "--seeds", "1", "--rounds", "8", "--out", "sweep", "--on", "ray"]
    words += ["--set", f"name={name}", "--set", "runtime.transport=memory", "--set", "runtime.report=false"]
    words += ["--set", f"model.name={model}:HeldUp"]
    command = [sys.executable, "-m", "fedemu", *words]
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "FEDEMU_LOCAL__LR": "0.02"}

    def rounds_there() -> int:
        found = 0
        for config in Path(tempfile.gettempdir()).glob("fedemu-*/run/config.toml"):
            with suppress(FileNotFoundError):  # another sweep may just remove its own
                found += finished_rounds(config.parent) if name in config.read_text() else 0
        return found

    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as sweep:
        end = time.monotonic() + LONGEST_SECONDS
        while not rounds_there() and time.monotonic() < end and sweep.poll() is None:
            time.sleep(0.1)
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(LONGEST_SECONDS) == INTERRUPTED
    [summary] = (tmp_path / "sweep").glob("**/seed-1/summary.json")
    stopped = json.loads(summary.read_text())
    assert stopped["outcome"] == "interrupted"
    assert 0 < stopped["rounds"] < 8
    slow.unlink()
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=LONGEST_SECONDS)
    assert len((tmp_path / "sweep" / "sweep.csv").read_text().splitlines()) == 2
    given = ["rounds=8", "runtime.transport=memory", "runtime.report=false", "local.lr=0.02"]
    given.append(f"model.name={model}:HeldUp")
    experiment, runtime = load_experiment("digits-small", given, {})
    alone = claim(experiment, tmp_path / "alone")
    assert run_together(alone, experiment, runtime, new=True, print_summary=False) == 0
    digest = json.loads((alone / "summary.json").read_text())["model_digest"]
    assert json.loads(summary.read_text())["model_digest"] == digest
