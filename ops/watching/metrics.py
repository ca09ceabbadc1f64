"""The Prometheus metrics of the coordinator and of a supervisor, each with a registry and a port of its own.

The names are a contract. The scrape configuration, the alert rules and the dashboard in ``monitoring/`` use them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from fedemu.coordinator.observer import Observers
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.summary import RunOutcome
from fedemu.device.machine.observer import MachineObserver
from fedemu.ops.watching.exporter import Exporter
from fedemu.ops.watching.run_state import RunState
from fedemu.protocol.messages import OUTCOMES

ROUND_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
TRAIN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0)


class CoordinatorMetrics(Observers):
    """An observer of a coordinator. It keeps the metrics that ``docs/metrics.md`` lists."""

    def __init__(self, registry: CollectorRegistry, rounds: int) -> None:
        """``rounds`` is the number of the run's last round."""
        super().__init__()

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        self._state = RunState(rounds, time.monotonic)
        registry.register(self._state)
        gauge("fedemu_rounds", "Rounds of the whole run.").set(rounds)
        self._round = gauge("fedemu_round", "Rounds finished.")
        self._period = gauge("fedemu_period", "Period of the stream that the last round belonged to, from 0.")
        self._duration = Histogram(
            "fedemu_round_duration_seconds", "Real time a round took.", buckets=ROUND_BUCKETS, registry=registry
        )
        self._devices = gauge("fedemu_devices", "Devices by state.", "state")
        self._results = counter("fedemu_results", "Selected devices by outcome.", "outcome")
        self._bytes = counter(
            "fedemu_bytes", "Bytes by direction (down, up) and kind (emulated, wire).", "direction", "kind"
        )
        self._accuracy = gauge("fedemu_accuracy", "Test accuracy of the global model.")
        self._loss = gauge("fedemu_loss", "Test loss of the global model.")
        self._period_accuracy = gauge("fedemu_period_accuracy", "Test accuracy by period of the stream.", "period")
        self._class_accuracy = gauge("fedemu_class_accuracy", "Test accuracy by class.", "label")
        self._round_forgetting = gauge("fedemu_round_forgetting", "Mean accuracy that classes lost in the last round.")
        self._virtual_time = gauge("fedemu_virtual_time_seconds", "The experiment's clock.")
        for metric in (self._accuracy, self._loss, self._round_forgetting):
            metric.set(math.nan)  # a gauge without labels begins with 0, which would be a measured value
        self._reached = 0.0
        self._rejected = counter("fedemu_rejected_messages", "Messages that could not be used.", "reason")
        self._retries = counter("fedemu_round_retries", "Rounds tried again for want of a quorum.")
        self._job_step = gauge("fedemu_server_job_step", "Steps done of the server job under way or last run.", "job")
        self._job_steps = gauge("fedemu_server_job_steps", "The most steps that this server job may take.", "job")
        self._job_seconds = counter("fedemu_server_job_seconds", "Real time that rounds spent on server jobs.")
        # Prometheus takes the first value of a series for its beginning, so each has to be there before it counts.
        for outcome in OUTCOMES:
            self._results.labels(outcome)
        for direction, kind in product(("down", "up"), ("emulated", "wire")):
            self._bytes.labels(direction, kind)

    def resumed(self, rows: Sequence[Row], spent: float) -> None:
        """Counters count from the start of this process, as Prometheus expects. Only gauges know of earlier rounds."""
        for row in rows:
            self._follow(row)
        self._state.resumed(rows[-1].round)

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        self._state.began()
        self._reach(virtual_time)

    def round_finished(self, row: Row) -> None:
        self._state.finished(row.round)
        self._duration.observe(row.round_seconds or 0.0)
        self._job_seconds.inc(row.server_seconds or 0.0)
        # Bytes are those of finished rounds, so a resumed run does not count them twice.
        for direction, kind, size in (
            ("down", "emulated", row.bytes_down),
            ("down", "wire", row.wire_bytes_down),
            ("up", "emulated", row.bytes_up),
            ("up", "wire", row.wire_bytes_up),
        ):
            self._bytes.labels(direction, kind).inc(size or 0)
        self._follow(row)

    def _follow(self, row: Row) -> None:
        """Set the gauges by a finished round. What it did not measure stays as it was measured last."""
        self._round.set(row.round)
        self._period.set(row.task or 0)
        self._reach(row.virtual_time or 0.0)
        for metric, value in (
            (self._accuracy, row.accuracy),
            (self._loss, row.loss),
            (self._round_forgetting, row.round_forgetting),
        ):
            if value is not None:
                metric.set(value)
        for by, values in ((self._class_accuracy, row.class_accuracy), (self._period_accuracy, row.period_accuracy)):
            for label, value in enumerate(values or ()):
                if value is not None:
                    by.labels(str(label)).set(value)

    def _reach(self, virtual_time: float) -> None:
        """The experiment's clock has come to this time, or further: the next round begins before a round is durable."""
        self._reached = max(self._reached, virtual_time)
        self._virtual_time.set(self._reached)

    def device_result(self, outcome: str) -> None:
        self._results.labels(outcome).inc()

    def fleet(self, counts: Mapping[str, int]) -> None:
        for state, count in counts.items():
            self._devices.labels(state).set(count)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        self._state.began()
        self._job_step.labels(name).set(step)
        self._job_steps.labels(name).set(steps)

    def event(self, name: str, **fields: Any) -> None:
        """Events go to the run directory. Those of rounds that are tried again are counted, too."""
        if name == "retry":
            self._retries.inc()

    def ended(self, outcome: RunOutcome) -> None:
        """The run is over. No device is connected any more."""
        self._state.ended(outcome)
        self._devices.clear()


class ServedMetrics:
    """The metrics of one coordinator, and the port that serves them. With port 0 there are none."""

    def __init__(self, port: int, rounds: int, address: str = "127.0.0.1") -> None:
        """``rounds`` is the number of the run's last round. Raises ConfigurationError if the port can't be used."""
        self.observers: list[CoordinatorMetrics] = []
        self._exporters: list[Exporter] = []
        if port:
            registry = CollectorRegistry()
            self._exporters.append(Exporter(registry, port, address))
            self.observers.append(CoordinatorMetrics(registry, rounds))

    def ended(self, outcome: RunOutcome) -> None:
        """The run is over. From now on its metrics do not change."""
        for metrics in self.observers:
            metrics.ended(outcome)
        for exporter in self._exporters:
            exporter.final()

    def close(self) -> None:
        """Stop serving, as ``Exporter.close`` does it."""
        for exporter in self._exporters:
            exporter.close()


class SupervisorMetrics(MachineObserver):
    """An observer of one machine's supervisor. It keeps the metrics that ``docs/metrics.md`` lists."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._devices = Gauge("fedemu_devices", "Devices by state.", ("state",), registry=registry)
        self._restarts = Counter("fedemu_restarts", "Processes started again.", ("kind",), registry=registry)
        self._queue = Gauge("fedemu_queue_depth", "Jobs that wait for a trainer.", registry=registry)
        self._train = Histogram(
            "fedemu_train_seconds", "Time of one group of jobs at a trainer.", buckets=TRAIN_BUCKETS, registry=registry
        )
        self._jobs = Counter("fedemu_jobs", "Training jobs by result.", ("result",), registry=registry)
        self._samples = Gauge(
            "fedemu_replay_samples", "Samples held in the replay buffers of this machine's devices.", registry=registry
        )
        self._bytes = Gauge(
            "fedemu_replay_bytes",
            "Bytes that the samples of replay buffers take in the devices' storage.",
            registry=registry,
        )
        self._buffers: dict[int, tuple[int, int]] = {}
        for kind in ("device", "trainer", "zygote"):
            self._restarts.labels(kind)
        for result in ("done", "failed"):
            self._jobs.labels(result)

    def devices(self, counts: Mapping[str, int]) -> None:
        for state, count in counts.items():
            self._devices.labels(state).set(count)

    def restarted(self, kind: str) -> None:
        self._restarts.labels(kind).inc()

    def queue_depth(self, depth: int) -> None:
        self._queue.set(depth)

    def trained(self, seconds: float, done: int, failed: int) -> None:
        self._train.observe(seconds)
        self._jobs.labels("done").inc(done)
        self._jobs.labels("failed").inc(failed)

    def given_up(self) -> None:
        self._jobs.labels("failed").inc()

    def buffered(self, device: int, samples: int, size: int) -> None:
        before, bytes_before = self._buffers.get(device, (0, 0))
        self._buffers[device] = samples, size
        self._samples.inc(samples - before)
        self._bytes.inc(size - bytes_before)
