"""The shipped alerts on recorded series: when each fires, and when it does not. promtool evaluates them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import yaml

MONITORING = Path(__file__).parents[3] / "ops" / "watching" / "monitoring"
INSTANCE = "127.0.0.1:9464"
COORDINATOR = {"instance": INSTANCE, "job": "fedemu-coordinator"}
MACHINE = {"instance": "127.0.0.1:9465", "job": "fedemu-supervisor"}

pytestmark = pytest.mark.skipif(
    which("promtool") is None, reason="promtool (Debian package prometheus) is not installed"
)


def _series(name: str, values: str, **labels: str) -> dict[str, str]:
    """Samples every 15 s, in the notation of promtool. ``stale`` is what Prometheus keeps where a target is gone."""
    target = MACHINE if name in ("fedemu_restarts_total", "fedemu_queue_depth") else COORDINATOR
    written = ",".join(f'{key}="{value}"' for key, value in {**target, **labels}.items())
    return {"series": f"{name}{{{written}}}", "values": values}


def _states(**values: str) -> list[dict[str, str]]:
    return [_series("fedemu_run_state", text, state=state) for state, text in values.items()]


def _fleet(connected: str, enrolled: str, away: str = "0x200") -> list[dict[str, str]]:
    return [
        _series("fedemu_devices", connected, state="connected"),
        _series("fedemu_devices", enrolled, state="enrolled"),
        _series("fedemu_devices", away, state="away"),
    ]


BEFORE = "_x7"
"""Two minutes in which there is no coordinator yet, but Prometheus: eight scrapes at 0:00 to 1:45."""

# Each case: what was recorded, and whether the alert fires at a time. The run begins at 2:00.
CASES: dict[str, tuple[str, list[dict[str, str]], dict[str, bool]]] = {
    "a coordinator that crashes is down after 30 seconds, until it is back": (
        "CoordinatorDown",
        # 2:00 to 5:00 it is there. The first scrape that fails is at 5:15.
        [
            _series("up", "0x7 1x12 0x39 1x40"),
            *_states(starting="_x8 1 0x11 stale _x39 1 0x39", running="_x8 0 1x11 stale _x39 0 1x39"),
        ],
        {"1m45s": False, "5m": False, "5m30s": False, "5m45s": True, "15m": True, "15m15s": False, "20m": False},
    ),
    "a coordinator that is away for less than 30 seconds is not down": (
        "CoordinatorDown",
        [_series("up", "0x7 1x12 0 1x40"), *_states(running="_x8 0 1x11 stale 1x40")],
        {"5m15s": False, "5m30s": False, "5m45s": False, "6m": False},
    ),
    "a coordinator that ended, and told so, is not down": (
        "CoordinatorDown",
        [_series("up", "0x7 1x12 0x400"), *_states(running="_x8 0 1x10 0 stale", completed="_x8 0x11 1 stale")],
        {"5m": False, "5m45s": False, "6m": False, "1h": False},
    ),
    "a run whose end fell between two scrapes is not down": (
        "CoordinatorDown",
        [_series("up", "0x7 1x12 0x400"), *_states(running="_x8 0 1x9 0 0 stale", ending="_x8 0x10 1 1 stale")],
        {"5m45s": False, "6m": False, "1h": False},
    ),
    "a port where there never was a run is not down": (
        "CoordinatorDown",
        [_series("up", "0x400")],
        {"30s": False, "1m": False, "1h": False},
    ),
    "a run without a quorum failed, for ten minutes": (
        "RunFailed",
        [_series("up", "0x7 1x12 0x400"), *_states(running="_x8 0 1x10 0 stale", quorum="_x8 0x11 1 stale")],
        {"4m45s": False, "5m": True, "14m45s": True, "15m15s": False},
    ),
    "a run that was completed did not fail": (
        "RunFailed",
        [*_states(quorum="_x8 0x12 stale", completed="_x8 0x11 1 stale")],
        {"2m": False, "5m": False, "10m": False},
    ),
    "rounds are stalled ten minutes after the last one": (
        "RoundsStalled",
        # The last round is told at 7:00.
        [_series("fedemu_round", "_x8 0+1x20 20x100"), *_fleet("_x8 5x120", "_x8 5x120")],
        {"2m": False, "12m": False, "16m30s": False, "17m": True, "25m": True},
    ),
    "a run without a first round is stalled after ten minutes, not at its start": (
        "RoundsStalled",
        [_series("fedemu_round", "_x8 0x100"), *_fleet("_x8 5x100", "_x8 5x100")],
        {"2m": False, "7m": False, "11m45s": False, "12m": True},
    ),
    "a round of nine minutes is not stalled": (
        "RoundsStalled",
        [_series("fedemu_round", "_x8 0+1x20 20x36 21+1x40"), *_fleet("_x8 5x100", "_x8 5x100")],
        {"7m": False, "12m": False, "15m45s": False, "16m": False, "17m": False, "24m": False},
    ),
    "rounds of seven minutes are not stalled": (
        "RoundsStalled",
        [_series("fedemu_round", "_x8 1x28 2x28 3x28 4x28"), *_fleet("_x8 5x115", "_x8 5x115")],
        {f"{minute}m": False for minute in range(2, 31)},
    ),
    "a server job that goes on is not stalled": (
        "RoundsStalled",
        [
            _series("fedemu_round", "_x8 3x150"),
            _series("fedemu_server_job_step", "_x8 0+1x150", exported_job="distil"),
            *_fleet("_x8 5x150", "_x8 5x150"),
        ],
        {"12m": False, "17m": False, "30m": False},
    ),
    "rounds of a finished run are not stalled": (
        "RoundsStalled",
        [_series("fedemu_round", "_x8 0+1x20 stale"), *_fleet("_x8 5x20 stale", "_x8 5x20 stale")],
        {"7m": False, "12m": False, "17m": False, "20m": False},
    ),
    "a fleet of which most are away for a minute is mostly gone": (
        "FleetMostlyGone",
        # 2:00 to 3:00 devices come, until 8:00 all are there, then four of ten stay.
        [*_fleet("_x8 0 2 5 8 10x20 4x20 10x20", "_x8 10x63")],
        {"2m": False, "3m": False, "8m": False, "9m": False, "9m15s": True, "13m": True, "14m": False},
    ),
    "a fleet that is gone for less than a minute is not mostly gone": (
        "FleetMostlyGone",
        [*_fleet("_x8 10x20 0x3 10x20", "_x8 10x43")],
        {"7m15s": False, "8m": False, "8m15s": False, "9m": False},
    ),
    "a fleet of which most are off-line by plan is not mostly gone before others lose their connections": (
        "FleetMostlyGone",
        # Of ten devices six are away by plan. At 7:15 six are gone, and two of the other four are away.
        [*_fleet("_x8 4x20 2x41", "_x8 10x62", "_x8 6x20 2x41")],
        {"2m": False, "5m": False, "7m15s": False, "8m": False, "8m30s": True, "15m": True},
    ),
    "a fleet of which most are off-line by plan is not gone": (
        "FleetMostlyGone",
        [*_fleet("_x8 4x60", "_x8 10x60", "_x8 6x60")],
        {f"{minute}m": False for minute in range(2, 17)},
    ),
    "the fleet of a finished run is not gone": (
        "FleetMostlyGone",
        [*_fleet("_x8 10x20 stale", "_x8 10x20 stale")],
        {"7m15s": False, "8m": False, "9m": False, "12m": False},
    ),
    "three tries within five minutes are too many": (
        "QuorumRetries",
        [_series("fedemu_round_retries_total", "_x8 0x8 1x3 2x3 3x3 3x40")],
        {"2m": False, "4m15s": False, "5m15s": False, "6m15s": True, "12m": False},
    ),
    "two tries within five minutes are not too many, nor is the end of the run": (
        "QuorumRetries",
        [_series("fedemu_round_retries_total", "_x8 0x20 1x3 2x3 stale")],
        {"7m15s": False, "8m": False, "9m": False, "10m": False, "11m": False, "12m": False},
    ),
    "messages are rejected when more than one a second is, for a minute": (
        "MessagesRejected",
        # From 7:15 on there are two a second.
        [_series("fedemu_rejected_messages_total", "_x8 0x20 30+30x40", reason="malformed")],
        {"2m": False, "7m15s": False, "8m": False, "9m": True, "12m": True},
    ),
    "a burst of messages is not rejected for a minute, and none are at the end": (
        "MessagesRejected",
        [_series("fedemu_rejected_messages_total", "_x8 0x20 900x20 stale", reason="malformed")],
        {"7m15s": False, "8m": False, "8m15s": False, "9m": False, "12m15s": False, "13m": False},
    ),
    "accuracy that stays below 70 % of the best for a minute fell": (
        "AccuracyFell",
        [_series("fedemu_round", "_x8 0+1x60"), _series("fedemu_accuracy", "_x8 0.1 0.5 0.9x18 0.5x40")],
        {"2m": False, "7m": False, "8m": False, "8m15s": True, "15m": True},
    ),
    "accuracy that comes back within a minute did not fall": (
        "AccuracyFell",
        [_series("fedemu_round", "_x8 0+1x60"), _series("fedemu_accuracy", "_x8 0.1 0.5 0.9x18 0.5x3 0.9x30")],
        {"7m15s": False, "8m": False, "8m15s": False, "9m": False},
    ),
    "the next run on the same port begins low, and its accuracy did not fall": (
        "AccuracyFell",
        [
            _series("fedemu_round", "_x8 0+1x20 stale _x4 0+1x60"),
            _series("fedemu_accuracy", "_x8 0.1 0.5 0.9x18 stale _x4 0.1x60"),
        ],
        {f"{minute}m": False for minute in range(2, 24)},
    ),
    "trainers that are started again four times in five minutes crash": (
        "TrainersCrash",
        [_series("fedemu_restarts_total", "_x8 0x8 1 2 3 4x40", kind="trainer")],
        {"2m": False, "4m15s": False, "4m30s": False, "5m": True, "11m": False},
    ),
    "a trainer that is started again now and then does not crash, nor does a device": (
        "TrainersCrash",
        [
            _series("fedemu_restarts_total", "_x8 0x8 1x20 2x20 stale", kind="trainer"),
            _series("fedemu_restarts_total", "_x8 0+1x48 stale", kind="device"),
        ],
        {"2m": False, "5m": False, "10m": False, "14m": False, "15m": False},
    ),
    "jobs that wait for five minutes queue": (
        "JobsQueue",
        [_series("fedemu_queue_depth", "_x8 0 5000x30 0x10")],
        {"2m": False, "2m15s": False, "7m": False, "7m15s": True, "10m": False},
    ),
    "jobs that wait for four minutes do not queue, nor do those of a finished run": (
        "JobsQueue",
        [_series("fedemu_queue_depth", "_x8 0 5000x16 0x20 5000x4 stale")],
        {"2m15s": False, "6m15s": False, "7m15s": False, "7m30s": False, "12m": False, "17m": False},
    ),
}


def _rules() -> dict[str, dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def test_every_alert_is_tried_where_it_fires_and_where_it_does_not() -> None:
    fires = {alert for alert, _, times in CASES.values() if any(times.values())}
    keeps_silent = {alert for alert, _, times in CASES.values() if not any(times.values())}
    assert fires == keeps_silent == set(_rules())


def test_alerts_fire_when_they_say_and_only_then(tmp_path: Path) -> None:
    """One call of promtool evaluates all cases. A wrong one is named in its output."""
    rules = _rules()
    tests = []
    for name, (alert, series, times) in CASES.items():
        query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
        expected = [
            {"expr": query, "eval_time": time, "exp_samples": [{"labels": "{}", "value": float(fires)}]}
            for time, fires in times.items()
        ]
        tests.append({"name": name, "interval": "15s", "input_series": series, "promql_expr_test": expected})
    assert len(rules) == 9
    plan = tmp_path / "alerts-test.yml"
    plan.write_text(
        json.dumps({"rule_files": [str(MONITORING / "alerts.yml")], "evaluation_interval": "15s", "tests": tests})
    )
    seldom = os.environ | {"GOGC": "400"}  # it looks for garbage, which is a third of its work
    done = subprocess.run(["promtool", "test", "rules", plan], env=seldom, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("kind", "name"), [("rules", "alerts.yml"), ("config", "prometheus.yml")])
def test_promtool_accepts_the_shipped_files(kind: str, name: str) -> None:
    done = subprocess.run(["promtool", "check", kind, name], cwd=MONITORING, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
