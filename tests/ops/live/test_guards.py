"""Which requests the page answers, by the host and the site that they name."""

from __future__ import annotations

import errno
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from fedemu.ops.live.guards import guard


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "127.0.0.1:8160", "Origin": "http://127.0.0.1:8160"}, 200),
        ({"Host": "localhost:9000", "Origin": "http://localhost:9000"}, 200),  # a tunnel from another port
        ({"Host": "localhost", "Origin": "http://localhost"}, 200),  # the port of http
        ({"Host": "127.0.0.1:8160"}, 200),
        ({"Host": "127.0.0.1:8160", "Origin": "http://127.0.0.1:9000"}, 403),  # another page of this machine
        ({"Host": "127.0.0.1:8160", "Origin": "http://127.0.0.1"}, 403),
        ({"Host": "127.0.0.1:8160", "Origin": "http://localhost:8160"}, 403),
        ({"Host": "127.0.0.1:8160", "Origin": "https://127.0.0.1:8160"}, 403),
        ({"Host": "localhost:8160", "Origin": "null"}, 403),
        ({"Host": "evil.example:8160"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Host": "localhost:8160@evil.example"}, 403),
        ({"Host": "0.0.0.0:8160"}, 403),
        ({"Host": ""}, 403),
        ({}, 403),
    ],
)
async def test_a_request_names_the_loopback_and_comes_from_the_page_itself(
    headers: dict[str, str], status: int
) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response()

    answer = await guard(make_mocked_request("GET", "/", headers=headers), page)
    assert answer.status == status


@pytest.mark.parametrize(
    ("site", "path", "status"),
    [
        ("same-origin", "/api/stream", 200),
        ("none", "/api/runs/0/devices/0", 200),  # a person has typed it
        ("cross-site", "/", 200),  # a person follows a link
        ("cross-site", "/api/runs/0/devices/0", 403),
        ("same-site", "/api/runs/0/devices/0", 403),  # another page of this machine
        ("cross-site", "/static/app.js", 403),
    ],
)
async def test_another_site_gets_nothing_but_a_link_to_the_page(site: str, path: str, status: int) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response()

    headers = {"Host": "127.0.0.1:8160", "Sec-Fetch-Site": site}
    answer = await guard(make_mocked_request("GET", path, headers=headers), page)
    assert answer.status == status


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (web.HTTPNotFound(), 404, "not found"),
        (ConnectionResetError("lost"), 400, "the body of the request can't be read"),
        (OSError(errno.ENAMETOOLONG, "File name too long"), 404, "File name too long"),
        (OSError(errno.EMFILE, ""), 500, "the limit of open files is reached; raise it (ulimit -n)"),
    ],
)
async def test_what_hinders_an_answer_is_told_in_a_sentence(error: Exception, status: int, said: str) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        raise error

    answer = await guard(make_mocked_request("GET", "/", headers={"Host": "localhost"}), page)
    assert isinstance(answer, web.Response)
    assert (answer.status, json.loads(answer.text or "")) == (status, {"error": said})
