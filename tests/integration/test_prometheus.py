"""A real Prometheus scrapes a live run with the shipped configuration."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from fedemu.ops.running.launch import free_address
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.ops.stress.warm import WarmStart

MONITORING = Path(__file__).parents[2] / "ops" / "watching" / "monitoring"


def _port() -> int:
    return int(free_address().rpartition(":")[2])


@pytest.mark.skipif(which("prometheus") is None, reason="prometheus (Debian package prometheus) is not installed")
def test_prometheus_scrapes_a_fleet_tells_of_its_crash_and_is_silent_when_a_run_is_over(
    new_fleet: Callable[..., LiveFleet], tmp_path: Path, warm: WarmStart
) -> None:
    coordinator, supervisor, own = _port(), _port(), _port()
    text = (MONITORING / "prometheus.yml").read_text()
    text = text.replace("9464", str(coordinator)).replace("9465", str(supervisor)).replace("1s", "250ms")
    (tmp_path / "prometheus.yml").write_text(text.replace("5s", "500ms"))
    (tmp_path / "alerts.yml").write_text((MONITORING / "alerts.yml").read_text().replace("for: 30s", "for: 1s"))
    fleet = new_fleet("rounds=100000", "fleet.give_up=90.0")
    fleet.start_coordinator("--metrics-port", str(coordinator))
    fleet.start_devices(20, "--trainers", "1", "--metrics-port", str(supervisor))
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{own}",
        "--log.level=error",
    ]

    def wait_for(query: str, least: float = 1.0) -> None:
        fleet.wait_until(lambda: _value(own, query) >= least, f"{query} >= {least}", 300)

    with (tmp_path / "prometheus.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            fleet.wait_for_round(5)
            # Without its trainer the fleet goes on, but no round does, which would only cost time.
            [trainer] = fleet.processes("trainer")
            fleet.signal(trainer, signal.SIGSTOP)
            for query, least in (
                ("fedemu_round", 3.0),
                ('fedemu_results_total{outcome="accepted"}', 1.0),
                ('fedemu_devices{job="fedemu-coordinator",state="connected"}', 1.0),
                ('sum(fedemu_bytes_total{kind="wire"})', 1.0),
                ("fedemu_accuracy", 0.01),
                ("count(fedemu_class_accuracy)", 10.0),
                ("fedemu_virtual_time_seconds", 0.001),
                ("fedemu_train_seconds_count", 1.0),
                ('fedemu_run_state{state="running"}', 1.0),
                ("min(up)", 1.0),
            ):
                wait_for(query, least)
            assert _value(own, "count(ALERTS)") == -1, "nothing is pending while the run goes on"
            assert fleet.coordinator is not None
            fleet.coordinator.kill()
            fleet.signal(trainer, signal.SIGCONT)
            wait_for('ALERTS{alertname="CoordinatorDown",alertstate="firing"}')

            # Another run on the same port, from its beginning to its end.
            run = ["run", "digits-small", "--transport", "memory", "--out", str(tmp_path / "run"), "--rounds", "30"]
            run += ["--set", "runtime.report=false", "--metrics-port", str(coordinator)]
            assert warm.start(run, tmp_path / "log", os.environ).wait(120) == 0, (tmp_path / "log").read_text()
            wait_for('up{job="fedemu-coordinator"} == bool 0')
            assert _value(own, 'last_over_time(fedemu_run_state{state="completed"}[1h])') == 1.0
            down = f'count_over_time((up{{instance="127.0.0.1:{coordinator}"}} == 0)[5s:250ms])'
            wait_for(down, 16.0)
            assert _value(own, f'count(ALERTS{{instance="127.0.0.1:{coordinator}"}})') == -1, "nothing pending either"
        finally:
            server.terminate()


def _value(port: int, query: str) -> float:
    """The first value of an instant query, or -1 if the query has no value yet."""
    try:
        result = _get(port, "query", {"query": query})["result"]
    except OSError:
        return -1.0
    return float(result[0]["value"][1]) if result else -1.0


def _get(port: int, what: str, parameters: dict[str, str]) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)["data"]
