"""The experiment that puts class-incremental learning under stress."""

from __future__ import annotations

from fedemu.ops.stress.scenarios import Scale

TASKS = Scale(
    experiment="digits-tasks",
    devices=12,
    overrides=(
        "fleet.devices=12",
        "fleet.per_round=5",
        "fleet.quorum=0.4",
        "fleet.start_timeout=120.0",
        "fleet.give_up=90.0",
        "liveness.heartbeat_seconds=1.0",
        "model.hidden=[16]",
        "local.epochs=1",
        "stream={kind='classes', tasks=4, rounds_per_task=3}",
        "availability={kind='always'}",
        "faults.crash_rate=0.0",
    ),
    rounds=10,
    disturbances=0,
)
"""Four tasks of two or three digits. Each has three rounds, but the last one is played for one round only."""
CHURN = (
    "availability={kind='exponential', mean_online=600.0, mean_offline=300.0}",
    "stream.period_seconds=1000.0",
    "faults.crash_rate=0.1",
)
"""Devices come and go from task to task, and drop out of rounds."""
