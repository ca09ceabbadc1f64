"""What keeps strangers out of the page: names of hosts, headers of answers, and the token of the buttons."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Middleware

TOKEN_HEADER: Final = "X-Fedemu-Token"
HTTP_PORT: Final = 80
"""The port that browsers leave out in the name of a host."""
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


def guard(port: int) -> Middleware:
    """A middleware that answers only requests that name the loopback.

    A page of a stranger whose host name was pointed at the loopback names that host, and gets nothing.
    """
    names = {"127.0.0.1", "localhost"}
    hosts = {f"{name}:{port}" for name in names} | (names if port == HTTP_PORT else set())

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        origin = request.headers.get("Origin")
        if request.headers.get("Host", "") not in hosts:
            return told(403, "this page is served to this machine only, as http://127.0.0.1")
        if origin is not None and origin not in {f"http://{host}" for host in hosts}:
            return told(403, "another site may not use this page")
        try:
            return await handler(request)
        except web.HTTPException as error:
            return told(error.status, error.reason.lower())

    return guarded


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers by which a browser runs only the scripts of the page itself."""
    response.headers.update(_HEADERS)
    response.headers.pop("Server", None)


def may_act(request: web.Request, token: str) -> bool:
    """Whether a request has the token of the buttons."""
    given = request.headers.get(TOKEN_HEADER, "")
    return hmac.compare_digest(given.encode(errors="replace"), token.encode())


def told(status: int, sentence: str) -> web.Response:
    """An answer that says in one sentence what was wrong."""
    return web.json_response({"error": sentence}, status=status)
