"""Serves the metrics of one process over HTTP, and lets a monitor read the last ones before it stops."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from socketserver import TCPServer, ThreadingMixIn
from typing import Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from fedemu.protocol.errors import ConfigurationError

LAST_SCRAPE_SECONDS = 1.0
"""The most real seconds that the end of a run waits for a monitor to read how it ended."""
MOST_CONNECTIONS: Final = 32
"""A further connection takes the place of the oldest: whoever opens many and says nothing takes no more than this."""
PATIENCE_SECONDS: Final = 10.0
"""A connection on which nothing moves for so long is closed."""


class Exporter:
    """Serves one registry over HTTP until it is closed."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str = "127.0.0.1") -> None:
        """Begin to serve. Port 0 takes a free port, see ``port``. Raises ConfigurationError if that is impossible."""
        try:
            self._server = _Server(address, port)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"the metrics port {port} can't be used at {address} ({error}); choose a free one with --metrics-port, "
                "or another address of this machine with --metrics-address"
            ) from error
        self.port: int = self._server.server_port
        self._page: Callable[[Any, Any], Iterable[bytes]] = make_wsgi_app(registry)
        self._server.set_app(self._answer)
        self._scraped = False
        self._final = False
        self._final_read = threading.Event()
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

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


class _Quiet(WSGIRequestHandler):
    """Answers one request, and logs nothing."""

    timeout = PATIENCE_SECONDS

    def log_message(self, format: str, *arguments: Any) -> None: ...


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and few connections: the processes that are watched have other work.

    Raises OSError or OverflowError if it cannot listen there.
    """

    daemon_threads = True
    request_queue_size = 4 * MOST_CONNECTIONS

    def __init__(self, address: str, port: int) -> None:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, place = found[0]
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        # An address of IPv6 comes with the network card on whose link it is.
        super().__init__(cast("tuple[str, int]", (place[0], port, *place[2:])), _Quiet)

    def server_bind(self) -> None:
        """Bind, without a look-up of this machine's name, for which a silent name server takes many seconds."""
        TCPServer.server_bind(self)
        host, port = self.socket.getsockname()[:2]
        self.server_name, self.server_port = str(host), int(port)
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            if len(self._open) > MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with suppress(OSError):  # it has just ended by itself
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks off, or that has to, is no fault of this process."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)
