"""Which requests the page answers, by the host and the site that they name."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from fedemu.ops.live.guards import HTTP_PORT, guard


@pytest.mark.parametrize(
    ("port", "headers", "status"),
    [
        (8160, {"Host": "127.0.0.1:8160", "Origin": "http://127.0.0.1:8160"}, 200),
        (8160, {"Host": "127.0.0.1"}, 403),
        (8160, {"Host": "127.0.0.1:8160", "Origin": "http://127.0.0.1"}, 403),
        (HTTP_PORT, {"Host": "127.0.0.1"}, 200),
        (HTTP_PORT, {"Host": "localhost", "Origin": "http://localhost"}, 200),
        (HTTP_PORT, {"Host": "localhost:80"}, 200),
        (HTTP_PORT, {"Host": "evil.example"}, 403),
        (HTTP_PORT, {"Host": "localhost", "Origin": "http://evil.example"}, 403),
    ],
)
async def test_a_host_without_a_port_is_the_page_only_at_the_port_of_http(
    port: int, headers: dict[str, str], status: int
) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response()

    answer = await guard(port)(make_mocked_request("GET", "/", headers=headers), page)
    assert answer.status == status
