"""What MLflow is told of a run: everything, and nothing twice, as its own client reads it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.ops.results.listing import find
from fedemu.ops.track.export import Export, export
from fedemu.protocol.errors import ConfigurationError

pytestmark = [
    pytest.mark.timeout(600),  # its packages take long to import on a busy machine
    pytest.mark.skipif(not find_spec("mlflow"), reason="the extra mlflow is not installed"),
]


def test_a_server_of_mlflow_that_does_not_answer_is_asked_again_for_seconds_and_not_for_minutes(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    waited: list[float] = []
    monkeypatch.setattr("urllib3.util.retry.time.sleep", waited.append)
    with pytest.raises(ConfigurationError, match=r"mlflow failed: .*Connection refused"):
        export(run, "mlflow", "http://127.0.0.1:9")
    assert 1 < sum(waited) < 30


def test_mlflow_reads_a_run_that_was_killed_and_went_on_without_doubles(
    run: Path, tmp_path: Path, add_rows: Callable[..., None], finish: Callable[..., None]
) -> None:
    from mlflow.tracking import MlflowClient

    store = str(tmp_path / "store")
    killed = Export(run, "mlflow", store, "papers")
    killed.more()
    killed._tracker.row(Row(3, accuracy=0.3), {"accuracy": 0.3})
    killed.close()
    add_rows(run, 3, 4)
    finish(run, 4)
    assert export(run, "mlflow", store, "papers") == store
    client = MlflowClient(tracking_uri=Path(store).as_uri())
    (experiment,) = [found for found in client.search_experiments() if found.name == "papers"]
    (found,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found.info.run_id, "accuracy")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]
    assert found.info.status == "FINISHED"
    assert export(run, "mlflow", store, "papers") == store
    assert client.get_run(found.info.run_id).info.status == "FINISHED", "there was nothing new to tell"
    add_rows(run, 5, 5)
    goes_on = Export(run, "mlflow", store, "papers")
    goes_on.more()
    assert client.get_run(found.info.run_id).info.status == "RUNNING"
    assert found.info.run_name == "run-7"
    assert found.data.params["local.lr"] == "0.25"
    assert found.data.tags["model_digest"] == "d" * 64
    artifacts = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert artifacts == {"experiment.toml", "figures", "model.safetensors", "end.json"}
    assert [*find(Path(store))] == [], "a folder of artifacts is no run"


def test_runs_that_begin_in_one_store_of_mlflow_at_the_same_time_are_in_one_experiment(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    store, other = str(tmp_path / "store"), shutil.copytree(run, tmp_path / "other")
    export(run, "mlflow", store)
    look, looks = MlflowClient.get_experiment_by_name, []

    def come_first(client: MlflowClient, name: str) -> object:
        """The first look is one before the other run has made the experiment. Meanwhile no third run begins."""
        third = os.open(tmp_path, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(third)
        looks.append(name)
        return look(client, name) if len(looks) > 1 else None

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", come_first)
    export(other, "mlflow", store)
    client = MlflowClient(tracking_uri=Path(store).as_uri())
    (experiment,) = [found for found in client.search_experiments() if found.name == "fedemu"]
    assert {found.info.run_name for found in client.search_runs([experiment.experiment_id])} == {"run-7", "other"}


def test_mlflow_gets_metrics_of_ones_own_under_names_that_it_takes(run: Path) -> None:
    from mlflow.tracking import MlflowClient

    reported = {"loss/own": 3.0, "loss": None, "acc@5": 0.5, "größe": 1.0, "../a//b": 2.0}
    reported |= {"p<1": 5.0, "p>1": 6.0, "x" * 250: 7.0}
    rows = [{"round": round, "device_metrics": reported | {"loss": loss}} for round, loss in ((1, None), (2, 4.0))]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    client = MlflowClient(tracking_uri=Path(export(run, "mlflow")).as_uri())
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    told = {name: value for name, value in found.data.metrics.items() if name.startswith("device_metrics/")}
    alike = {told.pop(name) for name in [*told] if name.startswith("device_metrics/p_1-")}
    assert alike == {5.0, 6.0}
    assert {told.pop(name) for name in [*told] if name.startswith("device_metrics/xxx")} == {7.0}
    assert told == {
        "device_metrics/loss.own": 3.0,  # a folder of metrics has no file of the same name
        "device_metrics/loss": 4.0,
        "device_metrics/acc_5": 0.5,
        "device_metrics/größe": 1.0,
        "device_metrics/a/b": 2.0,
    }


def test_mlflow_has_one_name_for_a_metric_in_all_rounds_whatever_other_rounds_measure(run: Path) -> None:
    from mlflow.tracking import MlflowClient

    measured = [
        {"device_metrics": {"a+b": 1.0}, "remarks": {"x": 1, "y": {"z": 2}}},
        {"device_metrics": {"a+b": 2.0, "a*b": 5.0}, "remarks": {"x": {"y": 2}, "y": 3}},
        {"device_metrics": {"a+b": 3.0, "a*b": 6.0, "a*b/c": 7.0, "d+/e": 8.0, "d*": 9.0}, "remarks": {"x": 3}},
    ]
    (run / "metrics.jsonl").write_text("")
    for round, values in enumerate(measured, 1):  # each is told by another process
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"round": round, **values}) + "\n")
        store = Path(export(run, "mlflow"))
    client = MlflowClient(tracking_uri=store.as_uri())
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert {
        name: [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, name)]
        for name in found.data.metrics
        if name != "finished_round"
    } == {
        "device_metrics/a_b": [(1, 1.0), (2, 2.0), (3, 3.0)],
        "device_metrics/a_b-7dc78c40": [(2, 5.0), (3, 6.0)],
        "device_metrics/a_b.c": [(3, 7.0)],
        "device_metrics/d_": [(3, 9.0)],
        "device_metrics.d_.e-8a994724": [(3, 8.0)],
        "remarks/x": [(1, 1.0), (3, 3.0)],
        "remarks/y/z": [(1, 2.0)],
        "remarks/x.y": [(2, 2.0)],
        "remarks/y-5db5a5a7": [(2, 3.0)],
    }


def test_mlflow_goes_on_in_a_run_that_was_moved_and_makes_nothing_where_it_was(
    run: Path, monkeypatch: pytest.MonkeyPatch, finish: Callable[..., None]
) -> None:
    from mlflow.tracking import MlflowClient

    export(run, "mlflow")
    # Another command exports later, which does not know where the artifacts were.
    known = "mlflow.tracking._tracking_service.utils._artifact_repos_cache"
    monkeypatch.setattr(known, OrderedDict(), raising=False)
    moved = run.rename(run.with_name("moved"))
    finish(moved, 2)
    client = MlflowClient(tracking_uri=Path(export(moved, "mlflow")).as_uri())
    (found,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    artifacts = {file.path for file in client.list_artifacts(found.info.run_id)}
    assert {"experiment.toml", "model.safetensors"} <= artifacts
    assert not run.exists()
