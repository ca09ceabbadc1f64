"""Coordinator and supervisor keep the metrics that alerts and dashboard use."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from fedemu.coordinator.record.row import Row
from fedemu.ops.watching.metrics import CoordinatorMetrics, SupervisorMetrics
from fedemu.ops.watching.run_state import STATES

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "ops" / "watching" / "monitoring"


def test_a_finished_round_is_counted_once_and_gauges_follow_it() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry, 100)
    row = Row(
        round=3,
        task=1,
        round_seconds=0.2,
        virtual_time=120.0,
        accuracy=0.5,
        class_accuracy=(0.25, None),
        period_accuracy=(None, 0.75),
        bytes_down=100,
        wire_bytes_up=7,
    )
    metrics.round_finished(row)
    metrics.round_finished(replace(row, round=4, accuracy=None))
    value = registry.get_sample_value
    assert value("fedemu_round") == 4
    assert value("fedemu_period") == 1
    assert value("fedemu_accuracy") == 0.5
    assert value("fedemu_class_accuracy", {"label": "0"}) == 0.25
    assert value("fedemu_class_accuracy", {"label": "1"}) is None
    assert value("fedemu_period_accuracy", {"period": "0"}) is None
    assert value("fedemu_period_accuracy", {"period": "1"}) == 0.75
    assert value("fedemu_bytes_total", {"direction": "down", "kind": "emulated"}) == 200
    assert value("fedemu_bytes_total", {"direction": "up", "kind": "wire"}) == 14
    assert value("fedemu_round_duration_seconds_count") == 2


def test_counters_are_there_before_they_count_because_prometheus_would_miss_what_comes_first() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    CoordinatorMetrics(registry, 100)
    SupervisorMetrics(other)
    families = [family for each in (registry, other) for family in each.collect()]
    without = {family.name for family in families if family.type == "counter" and not family.samples}
    assert without == {"fedemu_rejected_messages"}, "its reasons are not known before"


def test_a_resumed_run_tells_what_its_earlier_rounds_measured_last() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry, 100)
    value = registry.get_sample_value
    measured = ("fedemu_accuracy", "fedemu_loss", "fedemu_round_forgetting")
    assert all(math.isnan(value(name) or 0.0) for name in measured)
    seen = Row(round=7, task=1, accuracy=0.9, loss=0.3, round_forgetting=0.01, class_accuracy=(0.8, 1.0))
    metrics.resumed([seen, Row(round=8, task=2, virtual_time=4.0)], 9.0)
    assert [value(name) for name in measured] == [0.9, 0.3, 0.01]
    assert value("fedemu_class_accuracy", {"label": "0"}) == 0.8
    assert [value(name) for name in ("fedemu_round", "fedemu_period", "fedemu_virtual_time_seconds")] == [8, 2, 4.0]
    assert value("fedemu_round_duration_seconds_count") == 0
    assert value("fedemu_bytes_total", {"direction": "down", "kind": "emulated"}) == 0


def test_outcomes_are_there_before_anything_happened() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry, 100)
    assert registry.get_sample_value("fedemu_results_total", {"outcome": "late"}) == 0
    metrics.device_result("late")
    assert registry.get_sample_value("fedemu_results_total", {"outcome": "late"}) == 1


def test_a_round_that_is_tried_again_counts_at_once_also_if_nobody_can_be_asked_then() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry, 100)
    metrics.round_started(1, 0, 0.0, 10)
    metrics.event("dropout", device=1)
    assert registry.get_sample_value("fedemu_round_retries_total") == 0
    metrics.event("retry", round=1, attempt=0, accepted=0, needed=2)
    assert registry.get_sample_value("fedemu_round_retries_total") == 1
    metrics.round_started(1, 1, 600.0, 10)
    assert registry.get_sample_value("fedemu_round_retries_total") == 1


def test_a_server_job_shows_its_step_and_its_time_adds_up() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry, 100)
    metrics.server_job("distil", 1, 12, 50)
    metrics.server_job("distil", 2, 3, 50)
    for round in (1, 2):
        metrics.round_finished(Row(round=round, virtual_time=0.0, server_seconds=1.5))
    assert registry.get_sample_value("fedemu_server_job_step", {"job": "distil"}) == 3
    assert registry.get_sample_value("fedemu_server_job_steps", {"job": "distil"}) == 50
    assert registry.get_sample_value("fedemu_server_job_seconds_total") == 3.0


def test_replay_buffers_are_counted_in_samples_and_bytes_as_their_devices_last_told() -> None:
    registry = CollectorRegistry()
    metrics = SupervisorMetrics(registry)
    for device, samples in ((3, 5), (4, 2), (3, 4)):
        metrics.buffered(device, samples, 72 * samples)
    assert registry.get_sample_value("fedemu_replay_samples") == 6
    assert registry.get_sample_value("fedemu_replay_bytes") == 6 * 72


def test_jobs_that_no_trainer_has_answered_count_as_failed() -> None:
    registry = CollectorRegistry()
    metrics = SupervisorMetrics(registry)
    metrics.trained(0.5, 30, 2)
    metrics.given_up()
    counts = {name: registry.get_sample_value("fedemu_jobs_total", {"result": name}) for name in ("done", "failed")}
    assert counts == {"done": 30, "failed": 3}


def test_a_round_counts_when_it_is_durable_though_the_next_one_has_begun() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry, 50)
    metrics.resumed([Row(round=30, virtual_time=4.0)], 9.0)
    metrics.round_started(32, 0, 6.0, 10)
    told = ("fedemu_rounds", "fedemu_round", "fedemu_virtual_time_seconds")
    assert [registry.get_sample_value(name) for name in told] == [50, 30, 6.0]
    metrics.round_finished(Row(round=31, virtual_time=5.0))
    assert [registry.get_sample_value(name) for name in told] == [50, 31, 6.0]


def test_a_run_that_is_over_has_no_devices_and_tells_how_it_ended() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry, 50)
    metrics.fleet({"enrolled": 5, "connected": 5})
    metrics.ended("quorum")
    states = {state: registry.get_sample_value("fedemu_run_state", {"state": state}) for state in STATES}
    assert states == {state: float(state == "quorum") for state in STATES}
    assert registry.get_sample_value("fedemu_devices", {"state": "connected"}) is None


@pytest.mark.parametrize("name", ["alerts.yml", "dashboard.json"])
def test_alerts_and_dashboard_name_only_metrics_that_exist(name: str) -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry, 100)
    other = CollectorRegistry()
    SupervisorMetrics(other)
    known = {family.name for r in (registry, other) for family in r.collect()}
    text = (MONITORING / name).read_text()
    if name.endswith("json"):
        text = " ".join(t["expr"] for panel in json.loads(text)["panels"] for t in panel["targets"])
    used = {re.sub(r"_(total|bucket|count|sum)$", "", word) for word in re.findall(r"fedemu_\w+", text)}
    assert used, "no metric is named"
    assert used <= known


def test_panels_about_the_machines_of_devices_ask_for_these_and_not_for_the_coordinator() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    CoordinatorMetrics(registry, 100)
    SupervisorMetrics(other)
    coordinator, machine = ({family.name for family in r.collect()} for r in (registry, other))
    dashboard = json.loads((MONITORING / "dashboard.json").read_text())
    variables = {v["name"]: v["query"] for v in dashboard["templating"]["list"]}
    assert "fedemu_round," in variables["instance"]
    assert "fedemu_queue_depth," in variables["machine"]
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            for name, chosen in re.findall(r'(fedemu_[a-z_]+)\{instance=~"\$(\w+)"', target["expr"]):
                family = re.sub(r"_(total|bucket|count|sum)$", "", name)
                assert family in {"instance": coordinator, "machine": machine}[chosen], (panel["title"], name)
            asked = re.findall(r"fedemu_[a-z_]+", target["expr"])
            assert target["expr"].count("instance=~") == len(asked), panel["title"]


def test_panels_show_shares_in_percent_and_name_lines_by_labels_that_exist_and_by_their_run() -> None:
    kept = [*vars(CoordinatorMetrics(CollectorRegistry(), 100)).values()]
    kept += vars(SupervisorMetrics(CollectorRegistry())).values()
    labels = {each._name: {*each._labelnames} for each in kept if isinstance(each, MetricWrapperBase)}
    labels |= {"fedemu_run_state": {"state"}, "fedemu_rounds": set()}
    shares = {"fedemu_accuracy", "fedemu_class_accuracy", "fedemu_period_accuracy", "fedemu_round_forgetting"}
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        asked = set[str]()
        for target in panel["targets"]:
            names = {re.sub(r"_(total|bucket)$", "", name) for name in re.findall(r"fedemu_\w+", target["expr"])}
            known = {"instance"}.union(*(labels[name] for name in names))
            # Prometheus names a label so that a target has, too.
            told = {label.removeprefix("exported_") for label in re.findall(r"{{(\w+)}}", target["legendFormat"])}
            added = target["expr"].startswith("sum(")
            assert ("instance" in told) is not added, f"lines of several runs are alike in {panel['title']}"
            chosen = {*re.findall(r'[{,](\w+)=~?"', target["expr"])}
            assert told | chosen <= known, panel["title"]
            asked |= names
        if asked <= shares:
            assert panel["fieldConfig"]["defaults"]["unit"] == "percentunit", panel["title"]


def test_the_documentation_names_every_metric() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry, 100)
    text = (ROOT / "docs" / "metrics.md").read_text()
    missing = [family.name for family in registry.collect() if family.name not in text]
    assert missing == []
