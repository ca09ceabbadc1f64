"""A run on a Ray cluster of three nodes, which are processes here: a node is removed, and the digest stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedemu.ops.engines.nodes import settle
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.running.folder import claim
from fedemu.ops.running.together import run_together
from fedemu.ops.stress.fleet import finished_rounds

SMALL = {"num_cpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
LONGEST_SECONDS = 600.0
AT_HOME = {0: "a", 1: "b", 2: "c"}


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


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Three nodes of Ray on the loopback interface, with one core each."""
    utils = pytest.importorskip("ray.cluster_utils", reason="Ray is not installed: pip install 'fedemu[ray]'")
    made = utils.Cluster(initialize_head=True, head_node_args=SMALL)
    try:
        for _ in range(2):
            made.add_node(**SMALL)
        yield made
    finally:
        made.shutdown()


def until(condition: Callable[[], bool], run: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + LONGEST_SECONDS
    while not condition():
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.timeout(900)
def test_a_run_on_three_nodes_of_which_one_is_removed_has_the_digest_of_a_run_alone(
    cluster: Any, tmp_path: Path
) -> None:
    settings = ["rounds=20", "runtime.per_process=10", "runtime.report=false"]
    words = [word for setting in settings for word in ("--set", setting)]
    words += ["--set", f"runtime.shared_state={tmp_path / 'state'}"]
    command = [sys.executable, "-m", "fedemu", "run", "digits-small", *words, "--on", "ray", "--out", "run"]
    log = tmp_path / "log"
    with log.open("wb") as output:
        run = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | {"RAY_ADDRESS": cluster.address},
            stdout=output,
            stderr=output,
        )
    try:
        until(lambda: finished_rounds(tmp_path / "run") >= 2, run, log)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
        assert run.wait(LONGEST_SECONDS) == 0, log.read_text()
    finally:
        run.terminate()
        run.wait()
    told = (tmp_path / "run" / "logs" / "devices.out").read_text()
    assert "3 places on 3 nodes of Ray" in told
    assert "is lost with its node, or its process" in told
    experiment, runtime = load_experiment("digits-small", [*settings, "runtime.transport=memory"], {})
    alone = claim(experiment, tmp_path / "alone")
    assert run_together(alone, experiment, runtime, new=True, print_summary=False) == 0
    ends = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "alone")]
    assert ends[0]["model_digest"] == ends[1]["model_digest"]
    assert not ends[0]["perturbed"]


@pytest.mark.timeout(900)
def test_the_runs_of_a_sweep_on_ray_come_back_with_their_digests(cluster: Any, tmp_path: Path) -> None:
    words = ["sweep", "digits-small", "--seeds", "1-2", "--rounds", "2", "--out", "sweep", "--on", "ray"]
    ended = subprocess.run(
        [sys.executable, "-m", "fedemu", *words],
        cwd=tmp_path,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    experiment, runtime = load_experiment("digits-small", ["rounds=2", "runtime.transport=memory"], {})
    alone = claim(experiment, tmp_path / "alone")
    assert run_together(alone, experiment, runtime, new=True, print_summary=False) == 0
    [there] = (tmp_path / "sweep").glob("**/seed-1/summary.json")
    digest = json.loads((alone / "summary.json").read_text())["model_digest"]
    assert json.loads(there.read_text())["model_digest"] == digest
    assert len((tmp_path / "sweep" / "sweep.csv").read_text().splitlines()) == 3
