"""Serves the metrics of one process over HTTP, and lets a monitor read the last ones before it stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from fedemu.protocol.errors import ConfigurationError

LAST_SCRAPE_SECONDS = 1.0
"""The most real seconds that the end of a run waits for a monitor to read how it ended."""


class Exporter:
    """Serves one registry over HTTP until it is closed."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str = "127.0.0.1") -> None:
        """Begin to serve. Port 0 takes a free port, see ``port``. Raises ConfigurationError if that is impossible."""
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"the metrics port {port} can't be used at {address} ({error}); choose a free one with --metrics-port, "
                "or another address of this machine with --metrics-address"
            ) from error
        self.port: int = self._server.server_port
        self._page: Callable[[Any, Any], Iterable[bytes]] = self._server.get_app()  # type: ignore[assignment]
        self._server.set_app(self._answer)
        self._scraped = False
        self._final = False
        self._final_read = threading.Event()

    def final(self) -> None:
        """The registry has its last values. ``close`` gives a monitor that has scraped before the time to read them."""
        self._final = True

    def close(self) -> None:
        """Stop serving. The port is free when this returns.

        After ``final`` this waits for one more scrape, ``LAST_SCRAPE_SECONDS`` at most, if there has been a scrape.
        """
        try:
            if self._final and self._scraped:
                self._final_read.wait(LAST_SCRAPE_SECONDS)
        finally:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join(timeout=5)

    def _answer(self, environ: Any, start_response: Any) -> Iterable[bytes]:
        """One page. The server calls ``close`` of what this returns when the page is sent."""
        was_final = self._final
        return _Sent(self._page(environ, start_response), lambda: self._sent(was_final))

    def _sent(self, final: bool) -> None:
        self._scraped = True
        if final:
            self._final_read.set()


class _Sent:
    """The parts of a page, and what to call when they are sent."""

    def __init__(self, parts: Iterable[bytes], sent: Callable[[], None]) -> None:
        self._parts = parts
        self.close = sent

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._parts)
