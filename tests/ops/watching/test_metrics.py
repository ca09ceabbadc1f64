"""The exporter serves the metrics of coordinator and supervisor under the names that dashboards use."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import urllib.request
from dataclasses import replace
from pathlib import Path
from shutil import which

import pytest
from prometheus_client import CollectorRegistry

from fedemu.coordinator.record.row import Row
from fedemu.ops.watching.metrics import CoordinatorMetrics, Exporter, SupervisorMetrics
from fedemu.protocol.errors import ConfigurationError

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "ops" / "watching" / "monitoring"


def test_a_finished_round_is_counted_once_and_gauges_follow_it() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
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


def test_outcomes_are_there_before_anything_happened() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
    assert registry.get_sample_value("fedemu_results_total", {"outcome": "late"}) == 0
    metrics.device_result("late")
    assert registry.get_sample_value("fedemu_results_total", {"outcome": "late"}) == 1


def test_a_server_job_shows_its_step_and_its_time_adds_up() -> None:
    registry = CollectorRegistry()
    metrics = CoordinatorMetrics(registry)
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


def test_the_exporter_serves_its_registry_and_frees_its_port() -> None:
    registry = CollectorRegistry()
    SupervisorMetrics(registry).queue_depth(5)
    exporter = Exporter(registry, 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=5) as page:
        assert "fedemu_queue_depth 5.0" in page.read().decode()
    exporter.close()
    with socket.create_server(("127.0.0.1", exporter.port)):
        pass


def test_a_port_in_use_is_one_clear_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"the metrics port {port} can't be used .*--metrics-port"):
            Exporter(CollectorRegistry(), port)


@pytest.mark.parametrize("name", ["alerts.yml", "dashboard.json"])
def test_alerts_and_dashboard_name_only_metrics_that_exist(name: str) -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)
    other = CollectorRegistry()
    SupervisorMetrics(other)
    known = {family.name for r in (registry, other) for family in r.collect()}
    text = (MONITORING / name).read_text()
    if name.endswith("json"):
        text = " ".join(t["expr"] for panel in json.loads(text)["panels"] for t in panel["targets"])
    used = {re.sub(r"_(total|bucket|count|sum)$", "", word) for word in re.findall(r"fedemu_\w+", text)}
    assert used, "no metric is named"
    assert used <= known


@pytest.mark.skipif(which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
@pytest.mark.parametrize(("kind", "name"), [("rules", "alerts.yml"), ("config", "prometheus.yml")])
def test_promtool_accepts_the_shipped_files(kind: str, name: str) -> None:
    done = subprocess.run(["promtool", "check", kind, name], cwd=MONITORING, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(which("promtool") is None, reason="promtool (Debian package prometheus) is not installed")
def test_rounds_are_stalled_where_no_server_job_goes_on_either(tmp_path: Path) -> None:
    labels = 'instance="{}",job="fedemu-coordinator"'
    series = {
        "fedemu_round{LABELS}": "3x30",
        'fedemu_devices{LABELS,state="connected"}': "5x30",
        'fedemu_server_job_step{LABELS,exported_job="distil"}': "0+1x30",
    }
    told = [
        {"series": name.replace("LABELS", labels.format(instance)), "values": values}
        for instance, count in (("working", 3), ("stalled", 2))
        for name, values in list(series.items())[:count]
    ]
    stalled = {
        "exp_labels": {"severity": "warning", "instance": "stalled", "job": "fedemu-coordinator"},
        "exp_annotations": {"summary": "No round finished at stalled for ten minutes"},
    }
    checks = [{"eval_time": "25m", "alertname": "RoundsStalled", "exp_alerts": [stalled]}]
    tests = [{"interval": "1m", "input_series": told, "alert_rule_test": checks}]
    plan = tmp_path / "stalled.yml"
    plan.write_text(json.dumps({"rule_files": [str(MONITORING / "alerts.yml")], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", plan], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documentation_names_every_metric() -> None:
    registry = CollectorRegistry()
    CoordinatorMetrics(registry)
    text = (ROOT / "docs" / "metrics.md").read_text()
    missing = [family.name for family in registry.collect() if family.name not in text]
    assert missing == []
