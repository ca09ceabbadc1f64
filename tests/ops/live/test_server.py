"""The server of the page: what it answers to whom, and streams that go on where they were cut."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import re
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import aiohttp
import numpy as np
import pytest

from fedemu.algorithms.replay.buffer import Buffer
from fedemu.coordinator.record.holder import UNNAMED
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment.sources import load_experiment, read_frozen, write_frozen
from fedemu.ops.live import server, story
from fedemu.ops.live.guards import MOST_WAITING, is_own_fault
from fedemu.ops.live.run import LiveRun
from fedemu.ops.live.server import MOST_VIEWERS, Page
from fedemu.protocol.errors import DataError

TOKEN = "0123456789abcdef"
BREAK = "/api/runs/0/break"
MAY = f"X-Fedemu-Token: {TOKEN}\r\n"


@contextlib.asynccontextmanager
async def served(
    *directories: Path, find: Callable[[], Iterable[Path]] = tuple
) -> AsyncIterator[tuple[aiohttp.ClientSession, Page]]:
    """A session that speaks to the page of these runs, and of those that ``find`` gives later."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    page = Page(directories, TOKEN, find)
    following = asyncio.create_task(page.follow())
    try:
        async with page.served(listening), aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            yield session, page
    finally:
        following.cancel()


async def event(answer: aiohttp.ClientResponse) -> tuple[str, str, dict[str, Any]]:
    """The next event of a stream: its name, its id, its data."""
    found: dict[str, str] = {}
    async with asyncio.timeout(60):
        while True:
            line = (await answer.content.readline()).decode().rstrip("\n")
            if not line and "data" in found:
                return found["event"], found.get("id", ""), json.loads(found["data"])
            name, _, value = line.partition(": ")
            found[name] = value


def decode(directory: Path) -> None:
    """Decode the data of a run into the cache, as its coordinator does."""
    open_corpus(read_frozen(directory))


async def until(condition: Callable[[], bool]) -> None:
    """Return as soon as the condition is true."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.01)


async def test_a_viewer_gets_a_snapshot_then_news_and_goes_on_after_a_lost_connection(made: Any) -> None:
    made.row(1)
    async with served(made.directory) as (session, page):
        async with session.get("/api/stream") as answer:
            assert answer.content_type == "text/event-stream"
            assert await event(answer) == ("runs", "", {"directories": [str(made.directory)]})
            name, _, whole = await event(answer)
            assert (name, len(whole["rows"]), page.viewers) == ("snapshot", 1, 1)
            made.row(2)
            name, id, message = await event(answer)
            assert (name, [row["round"] for row in message["rows"]]) == ("tick", [2])
        made.row(3)
        async with session.get("/api/stream", headers={"Last-Event-ID": id}) as answer:
            name, _, message = await event(answer)
            assert (name, [row["round"] for row in message["rows"]]) == ("tick", [3])
        async with session.get("/api/stream", headers={"Last-Event-ID": "of-another-7"}) as answer:
            assert [(await event(answer))[0] for _ in range(2)] == ["runs", "snapshot"]


async def test_a_page_goes_on_after_the_folder_in_which_it_was_started_was_removed(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place := tmp_path / "place").mkdir()
    monkeypatch.chdir(place)
    async with served(made.directory) as (session, _):
        place.rmdir()
        async with session.get("/api/stream") as answer:
            assert [(await event(answer))[0] for _ in range(2)] == ["runs", "snapshot"]


async def test_a_long_log_is_read_to_its_end_before_a_viewer_is_told_of_it(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.ops.live.tail.MOST_BYTES", 1000)
    for round in range(1, 101):
        made.row(round)
    async with served(made.directory) as (session, _), session.get("/api/stream") as answer:
        whole = [await event(answer) for _ in range(2)][1][2]
    assert (whole["status"]["round"], len(whole["rows"])) == (100, 100)


async def test_a_page_answers_while_it_reads_a_long_log(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedemu.ops.live.tail.MOST_BYTES", 1000)
    for round in range(1, 501):
        made.row(round)
    async with served(made.directory) as (session, page), session.get("/api/stream") as answer:
        async with session.get("/") as index:
            assert index.status == 200
        assert page.stream.last == 0, "nobody is told of a part of it"
        assert [(await event(answer))[0] for _ in range(2)] == ["runs", "snapshot"]
        assert page.stream.last == 1


async def test_viewers_that_read_nothing_hold_nobody_up(made: Any) -> None:
    """Two megabytes are more than the buffers of a connection take, so the silent ones are stuck in the first."""
    made.row(1)
    async with served(made.directory) as (session, page), contextlib.AsyncExitStack() as stack:
        viewers = [await stack.enter_async_context(session.get("/api/stream")) for _ in range(6)]
        good = viewers[::2]
        for answer in good:
            assert [(await event(answer))[0] for _ in range(2)] == ["runs", "snapshot"]
        for number in range(40):
            page.stream.add("tick", {"filling": "x" * 100_000, "n": number})
        for answer in good:
            assert [(await event(answer))[2]["n"] for _ in range(40)] == [*range(40)]
        assert page.viewers == 6


async def test_a_viewer_that_takes_nothing_loses_its_connection(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server, "WRITE_SECONDS", 0.05)
    async with served(made.directory) as (session, page), session.get("/api/stream") as answer:
        assert [(await event(answer))[0] for _ in range(2)] == ["runs", "snapshot"]
        page.stream.add("tick", {"filling": "x" * 50_000_000})
        await until(lambda: not page.viewers)
    assert [record.message for record in caplog.records if is_own_fault(record)] == []


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n", b"GET /api/runs HTTP/1.1\r\nHost: localhost\r\n\r\n"])
async def test_connections_that_wait_take_few_places_and_keep_nobody_out(made: Any, said: bytes) -> None:
    """They have said nothing, or a part of a request, or have got the answer to a whole one."""
    async with served(made.directory) as (session, page), session.get("/api/stream") as answer:
        assert [(await event(answer))[0] for _ in range(2)] == ["runs", "snapshot"]
        host, port = str(answer.url.host), answer.url.port
        strangers = []
        for _ in range(4 * MOST_WAITING):
            reading, writing = await asyncio.open_connection(host, port)
            strangers.append((reading, writing))
            writing.write(said)
            if said.endswith(b"\r\n\r\n"):
                await reading.readuntil(b"}]")
        await until(lambda: sum(reading.at_eof() for reading, _ in strangers) == 3 * MOST_WAITING)
        assert [reading.at_eof() for reading, _ in strangers] == [True] * 3 * MOST_WAITING + [False] * MOST_WAITING
        async with session.get("/") as index:
            assert index.status == 200
        made.row(1)
        name, _, message = await event(answer)
        assert (name, [row["round"] for row in message["rows"]], page.viewers) == ("tick", [1], 1)
        for _, writing in strangers:
            writing.close()


async def test_what_happens_while_a_viewer_gets_its_snapshots_is_told_at_once(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BEAT_SECONDS", 3600.0)
    whole = LiveRun.snapshot

    def with_news(run: LiveRun) -> dict[str, Any]:
        run.stream.add("tick", {"n": 1})
        return whole(run)

    async with served(made.directory) as (session, _):
        monkeypatch.setattr(LiveRun, "snapshot", with_news)
        async with session.get("/api/stream") as answer:
            assert [(await event(answer))[0] for _ in range(3)] == ["runs", "snapshot", "tick"]


async def test_a_run_that_cannot_be_looked_at_for_a_while_is_looked_at_again(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if other connections to the page took all files that it may open."""
    look, refused = LiveRun.look, 0

    def refuse(run: LiveRun) -> None:
        nonlocal refused
        refused += 1
        raise OSError(errno.EMFILE, "Too many open files")

    async with served(made.directory) as (session, _), session.get("/api/stream") as answer:
        assert [(await event(answer))[0] for _ in range(2)] == ["runs", "snapshot"]
        monkeypatch.setattr(LiveRun, "look", refuse)
        await until(lambda: refused > 0)
        monkeypatch.setattr(server, "LOOK_SECONDS", -1.0)  # who comes now has the run looked at, however lately it was
        async with session.get("/api/stream") as other:
            assert await other.read() == b"", "it asks again"
        monkeypatch.setattr(LiveRun, "look", look)
        made.row(1)
        name, _, message = await event(answer)
        assert (name, [row["round"] for row in message["rows"]]) == ("tick", [1])


async def test_one_stream_tells_of_all_runs(make: Any) -> None:
    """A browser opens few connections to one server."""
    runs = [make(f"run-{number}") for number in range(8)]
    async with served(*(run.directory for run in runs)) as (session, page), session.get("/api/stream") as answer:
        assert (await event(answer))[2] == {"directories": [str(run.directory) for run in runs]}
        told = [await event(answer) for _ in runs]
        assert [(name, whole["run"]["number"]) for name, _, whole in told] == [
            ("snapshot", place) for place in range(8)
        ]
        # A viewer whose connection is lost among them has not got all of them, and begins anew.
        assert [id for _, id, _ in told] == [""] * 7 + [page.stream.id_of(page.stream.last)]
        runs[6].row(1)
        _, id, message = await event(answer)
        assert (message["number"], [row["round"] for row in message["rows"]]) == (6, [1])
        assert message["message"] > told[6][2]["message"]
    assert page.stream.number_of(id) == page.stream.last


async def test_a_run_that_begins_later_gets_its_place_as_soon_as_it_can_be_read(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "FIND_SECONDS", 0.05)
    first = make("first")
    later = tmp_path / "later"
    there = [first.directory, later]
    async with (
        served(first.directory, find=lambda: there) as (session, _),
        session.get("/api/stream") as answer,
    ):
        assert (await event(answer))[2] == {"directories": [str(first.directory)]}
        assert (await event(answer))[2]["run"]["number"] == 0
        second = make("later")
        while (told := await event(answer))[0] != "snapshot":
            pass
        assert told[2]["run"]["directory"] == str(later)
        second.row(1)
        while "rows" not in (told := await event(answer))[2]:
            assert told[0] == "tick"
        assert (told[2]["number"], told[2]["rows"][0]["round"]) == (1, 1)
        async with session.get("/api/runs") as runs:
            assert [about["number"] for about in await runs.json()] == [0, 1]


async def test_only_the_loopback_by_its_name_is_answered(made: Any) -> None:
    async with served(made.directory) as (session, _):
        async with session.get("/") as answer:
            assert answer.status == 200
            policy = answer.headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy
            assert "unsafe-inline" not in policy
            assert "<script>" not in await answer.text()
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            async with session.get("/api/runs", headers=headers) as answer:
                assert answer.status == 403
        digits = "9" * 5000  # more than Python makes a number of
        for path in (
            *("/api/runs/1/devices/0", f"/api/runs/{digits}/devices/0", f"/api/runs/0/devices/{digits}"),
            *("/static/../server.py", "/static/%2e%2e/server.py", "/nothing"),
        ):
            async with session.get(path) as answer:
                assert answer.status in (403, 404), path
        async with session.get("/api/runs/0/devices/12") as answer:
            assert (answer.status, await answer.json()) == (404, {"error": "the run has 12 devices"})


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {}, 200),
        ("/static/words.js", {}, 200),
        ("/api/runs", {}, 200),
        ("/api/stream", {}, 200),
        ("/nothing", {}, 404),
        ("/", {"Host": "evil.example"}, 403),
    ],
)
async def test_no_answer_can_be_framed_kept_or_taken_for_another_kind(
    path: str, headers: dict[str, str], status: int, made: Any
) -> None:
    async with served(made.directory) as (session, _), session.get(path, headers=headers) as answer:
        assert answer.status == status
        rules = answer.headers["Content-Security-Policy"].split("; ")
        # None of the last three follows from the first one.
        assert {"default-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"} <= {*rules}
        assert (answer.headers["X-Content-Type-Options"], answer.headers["Cache-Control"]) == ("nosniff", "no-store")


async def test_a_page_is_wanted_while_somebody_watches_and_for_a_while_after_it(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "BEAT_SECONDS", 0.01)  # so the end of a connection is noticed, too
    async with served(made.directory) as (session, page):
        page.left -= 3600
        assert not page.wanted(60)
        async with session.get("/api/stream") as answer:
            assert (await event(answer))[0] == "runs"
            assert page.wanted(0)
        await until(lambda: not page.viewers)
        assert (page.wanted(0), page.wanted(60)) == (False, True)
        shutil.rmtree(made.directory)  # as for an experiment that could not begin
        assert not page.wanted(60)


@pytest.mark.parametrize(
    ("token", "body", "status", "said"),
    [
        (None, {"action": "kill", "devices": [0]}, 403, "the token is wrong"),
        ("wrong", {"action": "kill", "devices": [0]}, 403, "the token is wrong"),
        ("falsch-ä", {"action": "kill", "devices": [0]}, 403, "the token is wrong"),
        (TOKEN, {"action": "kill", "devices": [12]}, 409, "devices must be a list of numbers from 0 to 11"),
        (TOKEN, {"action": "kill", "devices": [True]}, 409, "devices must be a list of numbers"),
        (TOKEN, {"action": "kill", "devices": []}, 409, "no device is selected"),
        (TOKEN, {"action": "kill", "devices": [0]}, 409, "no supervisor of this run is on this machine now"),
        (TOKEN, {"action": "kill_trainer"}, 409, "no supervisor"),
        (TOKEN, {"action": "kill_coordinator"}, 409, "no coordinator is at work"),
        (TOKEN, {"action": "format the disk"}, 409, "there is no action"),
        (TOKEN, ["kill"], 400, "no JSON object"),
    ],
)
async def test_a_button_needs_the_token_and_something_to_break(
    made: Any, token: str | None, body: Any, status: int, said: str
) -> None:
    headers = {} if token is None else {"X-Fedemu-Token": token}
    async with served(made.directory) as (session, _):
        async with session.post(BREAK, json=body, headers=headers) as answer:
            assert answer.status == status
            assert said in (await answer.json())["error"]
        async with session.get(BREAK, headers=headers) as answer:
            assert answer.status == 405


@pytest.mark.parametrize("body", [b"", b"[" * 100_000, b"\xff\xfe", b"{}" * 2**20, b'{"action": ' * 100_000])
@pytest.mark.usefixtures("uncollected")
async def test_a_request_that_is_no_json_is_refused(made: Any, body: bytes) -> None:
    headers = {"X-Fedemu-Token": TOKEN, "Content-Type": "application/json; charset=nonsense"}
    async with served(made.directory) as (session, _), session.post(BREAK, data=body, headers=headers) as answer:
        assert (answer.status, await answer.json()) == (400, {"error": "the request is no JSON object"})


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (f"GET /static/{'a' * 300} HTTP/1.1\r\nHost: HOST\r\nConnection: close\r\n\r\n", "404"),
        ("GET / HTTP/1.1\r\n\r\n", "400|403"),  # aiohttp 3.11 leaves it to the page to refuse it
        ("\x00garbage\r\n\r\n", "400"),
        (f"POST {BREAK} HTTP/1.1\r\nHost: HOST\r\n{MAY}Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx", "400"),
        (f"POST {BREAK} HTTP/1.1\r\nHost: HOST\r\n{MAY}Content-Encoding: br\r\nContent-Length: 2\r\n\r\nxx", "400"),
        (f"POST {BREAK} HTTP/1.1\r\nHost: HOST\r\n{MAY}Transfer-Encoding: chunked\r\n\r\nzz\r\n", "400"),
        (f"POST {BREAK} HTTP/1.1\r\nHost: HOST\r\n{MAY}Content-Length: 9\r\n\r\n[", None),
    ],
)
async def test_a_request_that_is_no_request_is_no_fault_of_the_page(
    made: Any, request_line: str, status: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(made.directory) as (session, _):
        async with session.get("/") as answer:
            page = answer.url
        reading, writing = await asyncio.open_connection(page.host, page.port)
        writing.write(request_line.replace("HOST", page.authority).encode())
        if status is None:
            writing.close()  # the rest of the body never comes
        else:
            line = await asyncio.wait_for(reading.readline(), 30)
            assert re.match(rf"HTTP/1\.[01] ({status}) ", line.decode())
            writing.close()
        async with session.get("/") as answer:
            assert answer.status == 200
    assert [record.message for record in caplog.records if is_own_fault(record)] == []


async def test_a_fault_of_the_page_itself_is_logged(
    made: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(LiveRun, "about", MagicMock(side_effect=ValueError("odd")))
    async with served(made.directory) as (session, _), session.get("/api/runs") as answer:
        assert answer.status == 500
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info and is_own_fault(record)] == ["odd"]


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("kill_coordinator", "the coordinator is in another container or on another machine; kill it there"),
        ("kill_supervisor", "no supervisor of this run is on this machine now"),
        ("resume", "the run goes on already"),
    ],
)
async def test_a_coordinator_that_is_elsewhere_is_neither_killed_nor_resumed(
    made: Any, monkeypatch: pytest.MonkeyPatch, action: str, said: str
) -> None:
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: UNNAMED)
    async with served(made.directory) as (session, _):
        button = {"json": {"action": action}, "headers": {"X-Fedemu-Token": TOKEN}}
        async with session.post(BREAK, **button) as answer:
            assert (answer.status, await answer.json()) == (409, {"error": said})


async def test_more_viewers_than_the_limit_are_told_so(made: Any) -> None:
    async with served(made.directory) as (session, page):
        page.viewers = MOST_VIEWERS
        async with session.get("/api/stream") as answer:
            assert answer.status == 503
            assert "viewers watch already" in (await answer.json())["error"]


async def test_a_device_tells_its_story(made: Any) -> None:
    made.ask(1, [3, 5], "ad")
    made.append("events", {"event": "join", "device": 3, "virtual_time": 0.0, "incarnation": 1})
    decode(made.directory)
    async with served(made.directory) as (session, _), session.get("/api/runs/0/devices/3") as answer:
        told = await answer.json()
    assert [(visit["round"], visit["outcome"], visit["time"]) for visit in told["visits"]] == [(1, "a", 0.5)]
    assert [event["event"] for event in told["events"]] == ["join"]
    assert sum(told["labels"][0]) > 0
    assert len(told["labels"][0]) == len(told["classes"]) == 10
    assert told["profile"]["latency"] > 0


async def test_a_story_of_many_classes_shows_the_first_ones_and_counts_all_samples_that_a_device_keeps(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make("many", "stream.kind=periods", "stream.periods=2", "replay.strategy=naive_uniform", "replay.capacity=9")
    decode(made.directory)
    monkeypatch.setattr(story, "MOST_CLASSES", 4)
    monkeypatch.setattr(story, "_buffer", lambda run, device: Buffer(np.arange(9), np.zeros(9, dtype=np.int64)))
    async with served(made.directory) as (session, _), session.get("/api/runs/0/devices/3") as answer:
        told = await answer.json()
    assert (len(told["classes"]), told["class_count"], len(told["labels"][0])) == (4, 10, 4)
    kept = told["replay"]["kept"]
    assert (told["replay"]["samples"], len(kept[0]), sum(map(sum, kept)) < 9) == (9, 4, True)


async def test_a_story_is_that_of_the_experiment_which_is_in_the_folder_now(made: Any) -> None:
    async def samples(session: aiohttp.ClientSession) -> int:
        async with session.get("/api/runs/0/devices/3") as answer:
            return int(sum((await answer.json())["labels"][0]))

    decode(made.directory)
    async with served(made.directory) as (session, _):
        alone = await samples(session)
        shutil.rmtree(made.directory)
        made.directory.mkdir()
        overrides = ["fleet.devices=6", "data.partition.kind=iid"]
        write_frozen(load_experiment("digits-small", overrides, {})[0], made.directory)
        async with session.get("/api/stream") as answer:
            assert (await event(answer))[0] == "runs"
            assert (await event(answer))[2]["run"]["devices"] == 6
        assert (alone, await samples(session)) == (103, 239)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (DataError("the disk is away"), "the disk is away"),
        (PermissionError(errno.EACCES, "Permission denied"), "[Errno 13] Permission denied"),
    ],
)
async def test_data_that_could_not_be_read_for_a_story_are_tried_again(
    made: Any, monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    found = story.entry_here
    decode(made.directory)
    monkeypatch.setattr(story, "entry_here", MagicMock(side_effect=error))
    async with served(made.directory) as (session, _):
        for missing in (f"the data of the run can't be read here: {said}", None):
            async with session.get("/api/runs/0/devices/3") as answer:
                assert (await answer.json()).get("missing") == missing
            monkeypatch.setattr(story, "entry_here", found)


async def test_a_story_runs_no_code_of_the_experiment_and_tells_of_data_that_were_decoded_before(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"
    own = tmp_path / "own.py"
    own.write_text(
        "import numpy as np\n"
        f"open({str(ran)!r}, 'w').close()\n"
        "def made():\n    return {'x': np.zeros((300, 4)), 'y': np.arange(300) % 3}\n"
    )
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    run = make("a run", f"data.dataset={own}:made", "data.partition.kind=iid")
    config = run.directory / "config.toml"
    async with served(run.directory) as (session, _):
        async with session.get("/api/runs/0/devices/3") as answer:
            missing = (await answer.json())["missing"]
        assert missing == (
            f"the data of the run are not in the cache of this machine; fedemu validate '{config}' decodes them, "
            "and runs the code that the experiment names"
        )
        assert not ran.exists()
        decode(run.directory)
        async with session.get("/api/runs/0/devices/3") as answer:
            told = await answer.json()
    assert ("missing" in told, told["classes"], told["labels"]) == (False, ["0", "1", "2"], [[5, 8, 7]])


async def test_a_story_that_cannot_be_told_says_why(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "_buffer", MagicMock(side_effect=DataError("the buffer is damaged")))
    async with served(made.directory) as (session, _), session.get("/api/runs/0/devices/3") as answer:
        assert (answer.status, await answer.json()) == (409, {"error": "the buffer is damaged"})


async def test_a_process_that_ended_before_a_button_reached_it_is_told(
    made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.ops.live.run.holder_of", lambda path: 2**22 + 1)  # no process has this number
    async with served(made.directory) as (session, _):
        button = {"json": {"action": "kill_coordinator"}, "headers": {"X-Fedemu-Token": TOKEN}}
        async with session.post(BREAK, **button) as answer:
            assert (answer.status, "has ended by itself" in (await answer.json())["error"]) == (409, True)


async def test_the_story_of_a_long_run_tells_the_last_visits(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedemu.ops.live.tail.MOST_BYTES", 1000)
    for round in range(1, 101):
        made.ask(round, [3], "a")
        made.append("events", {"event": "join", "device": 3, "virtual_time": float(round)})
    async with served(made.directory) as (session, _), session.get("/api/runs/0/devices/3") as answer:
        told = await answer.json()
    assert [visit["round"] for visit in told["visits"]] == [*range(100, 40, -1)]
    assert [event["virtual_time"] for event in told["events"]] == [*range(100, 60, -1)]
