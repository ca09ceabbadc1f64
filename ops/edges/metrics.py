"""The Prometheus metrics of an edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from fedemu.ops.experiment import Runtime
from fedemu.ops.watching.exporter import Exporter


@contextmanager
def served(runtime: Runtime, traffic: Callable[[], Mapping[str, int]]) -> Iterator[None]:
    """Serve the metrics as ``runtime`` says; on port 0 nothing is served. ``traffic`` is that of the edge."""
    if not runtime.metrics_port:
        yield
        return
    registry = CollectorRegistry()
    registry.register(_Traffic(traffic))
    exporter = Exporter(registry, runtime.metrics_port, runtime.metrics_address)
    try:
        yield
    finally:
        exporter.close()


class _Traffic(Collector):
    """The bytes that an edge has sent and received, by side (up, down) and direction (sent, received)."""

    def __init__(self, traffic: Callable[[], Mapping[str, int]]) -> None:
        self._traffic = traffic

    def collect(self) -> Iterator[CounterMetricFamily]:
        bytes_of = CounterMetricFamily("fedemu_edge_bytes", "Bytes over the wire.", labels=["side", "direction"])
        for name, size in self._traffic().items():
            bytes_of.add_metric(name.split("_"), size)
        yield bytes_of
