"""What keeps strangers out of the page: names of hosts, headers of answers, the token of the buttons, and the door."""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Final, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from fedemu.protocol.host.files import refusal_of

MOST_WAITING: Final = 32
"""The most connections on which the page waits for a request."""
TOKEN_HEADER: Final = "X-Fedemu-Token"
_OWN_SITES: Final = ("same-origin", "none")
"""What a browser says of the site from which a request comes: the page itself, or nobody but the person."""
_LOOPBACK: Final = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?")
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Door:
    """The connections on which the page waits for a request, ``MOST_WAITING`` at most.

    A further one takes the place of the one that has waited longest. So whoever opens many and says nothing keeps
    nobody out. A connection whose request is being answered, such as that of a viewer, does not wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, None] = {}

    def entered(self, protocol: asyncio.Protocol) -> asyncio.Protocol:
        """The protocol for a new connection. It notes the connection, and hands it to ``protocol``."""
        return _Entering(self, protocol)

    def waits(self, connection: asyncio.Transport) -> None:
        """The page waits for a request on this connection."""
        self._waiting = {one: None for one in self._waiting if not one.is_closing()} | {connection: None}
        if len(self._waiting) > MOST_WAITING:
            next(iter(self._waiting)).close()

    @web.middleware
    async def attend(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request, on a connection that does not wait meanwhile."""
        connection = request.transport
        if connection is None:
            return await handler(request)
        self._waiting.pop(connection, None)
        try:
            return await handler(request)
        finally:
            if not connection.is_closing():
                self.waits(connection)


class _Entering(asyncio.Protocol):
    """Notes a new connection at a door, and hands it on."""

    def __init__(self, door: Door, protocol: asyncio.Protocol) -> None:
        self._door = door
        self._protocol = protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.set_protocol(self._protocol)
        self._protocol.connection_made(transport)
        self._door.waits(cast("asyncio.Transport", transport))


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer only requests that name the loopback and come from the page itself.

    A page of a stranger whose host name was pointed at the loopback names that host, and gets nothing. Any port will
    do: the other end of a tunnel may have another one. Other sites may have a link to the page, and nothing else: a
    browser sends a request for a picture of another site without an ``Origin``, and tells the site alone.
    """
    host = request.headers.get("Host", "")
    if not _LOOPBACK.fullmatch(host):
        return told(403, "this page is served to this machine only, as http://127.0.0.1; from another one use ssh -L")
    is_link = request.path == "/" and request.method == "GET"
    is_own = is_link or request.headers.get("Sec-Fetch-Site", "none") in _OWN_SITES
    if not is_own or request.headers.get("Origin", f"http://{host}") != f"http://{host}":
        return told(403, "another site may not use this page")
    try:
        return await handler(request)
    except web.HTTPException as error:
        return told(error.status, error.reason.lower())
    except (web.RequestPayloadError, ConnectionError):
        return told(400, "the body of the request can't be read")
    except OSError as error:
        return told(404 if error.errno == errno.ENAMETOOLONG else 500, refusal_of(error))


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers by which a browser runs only the scripts of the page itself."""
    response.headers.update(_HEADERS)
    response.headers.pop("Server", None)


def is_own_fault(record: logging.LogRecord) -> bool:
    """Whether a record of the web server tells a fault of the page, and not one of a request or of its connection."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | web.RequestPayloadError | ConnectionError)


def may_act(request: web.Request, token: str) -> bool:
    """Whether a request has the token of the buttons."""
    given = request.headers.get(TOKEN_HEADER, "")
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def told(status: int, sentence: str) -> web.Response:
    """An answer that says in one sentence what was wrong."""
    return web.json_response({"error": sentence}, status=status)
