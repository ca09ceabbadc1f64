"""The exporter serves its registry, and lets a monitor that scrapes read the last values."""

from __future__ import annotations

import socket
import struct
import threading
import urllib.request
from contextlib import ExitStack
from ipaddress import IPv6Address
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from fedemu.ops.watching import exporter as module
from fedemu.ops.watching.exporter import Exporter
from fedemu.ops.watching.metrics import SupervisorMetrics
from fedemu.protocol.errors import ConfigurationError


def test_the_exporter_serves_its_registry_and_frees_its_port() -> None:
    registry = CollectorRegistry()
    SupervisorMetrics(registry).queue_depth(5)
    exporter = Exporter(registry, 0)
    assert "fedemu_queue_depth 5.0" in _page(exporter)
    exporter.close()
    with socket.create_server(("127.0.0.1", exporter.port)):
        pass


def test_a_port_in_use_is_one_clear_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"the metrics port {port} can't be used .*--metrics-port"):
            Exporter(CollectorRegistry(), port)
    with pytest.raises(ConfigurationError, match=r"port \d+ can't be used at 203\.0\.113\.1 .*--metrics-address"):
        Exporter(CollectorRegistry(), port, "203.0.113.1")


def test_an_address_that_holds_on_one_network_card_alone_is_served() -> None:
    known = Path("/proc/net/if_inet6")
    lines = [line.split() for line in known.read_text().splitlines()] if known.exists() else []
    found = [f"{IPv6Address(int(number, 16))}%{card}" for number, *_, card in lines if number.startswith("fe80")]
    if not found:
        pytest.skip("no network card has an address of IPv6 for its own link")
    exporter = Exporter(CollectorRegistry(), 0, address := found[0])
    socket.create_connection((address, exporter.port), timeout=10).close()
    exporter.close()


def test_connections_that_say_nothing_take_few_threads_and_keep_no_monitor_out() -> None:
    exporter = Exporter(CollectorRegistry(), 0)
    before = threading.active_count()
    with ExitStack() as strangers:
        for number in range(200):
            strangers.enter_context(socket.create_connection(("127.0.0.1", exporter.port)))
            if not number % 50:
                _page(exporter)
        _page(exporter)
        assert threading.active_count() - before < 50
    exporter.close()


def test_nobody_is_asked_for_the_name_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(socket, "getfqdn", lambda *name: asked.append(name) or "here")
    Exporter(CollectorRegistry(), 0).close()
    assert not asked


def test_a_connection_that_breaks_off_is_no_error(capfd: pytest.CaptureFixture[str]) -> None:
    exporter = Exporter(CollectorRegistry(), 0)
    reset = struct.pack("ii", 1, 0)
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", exporter.port)) as stranger:
            stranger.sendall(b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
    _page(exporter)
    exporter.close()
    assert capfd.readouterr() == ("", "")


def test_the_end_waits_for_the_scrape_of_the_last_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LAST_SCRAPE_SECONDS", 60.0)
    registry = CollectorRegistry()
    metrics = SupervisorMetrics(registry)
    exporter = Exporter(registry, 0)
    _page(exporter)
    metrics.queue_depth(7)
    exporter.final()
    closed = threading.Thread(target=exporter.close)
    closed.start()
    assert "fedemu_queue_depth 7.0" in _page(exporter), "it serves while it waits"
    closed.join(timeout=60)
    assert not closed.is_alive()


@pytest.mark.parametrize("scraped", [False, True])
def test_the_end_does_not_wait_where_nobody_scrapes_or_the_last_values_were_read(
    scraped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LAST_SCRAPE_SECONDS", 60.0)
    exporter = Exporter(CollectorRegistry(), 0)
    exporter.final()
    if scraped:
        _page(exporter)
    closed = threading.Thread(target=exporter.close)
    closed.start()
    closed.join(timeout=60)
    assert not closed.is_alive()


def _page(exporter: Exporter) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=60) as page:
        return str(page.read().decode())
