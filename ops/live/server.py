"""The server of the live page: files, streams of what happens, stories of devices, and the buttons."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from fedemu.ops.live import breaking
from fedemu.ops.live.guards import Door, add_headers, guard, may_act, told
from fedemu.ops.live.run import LiveRun
from fedemu.ops.live.story import Stories
from fedemu.ops.live.stream import Stream, frame
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.paths import exists

STATIC: Final = Path(__file__).parent / "static"
STYLE: Final = Path(__file__).parent.parent / "pages" / "templates" / "style.css"
LOOK_SECONDS: Final = 0.25
"""How often the run directories are looked at while somebody watches."""
FIND_SECONDS: Final = 2.0
"""How often runs that have begun since are looked for while somebody watches."""
TURN_SECONDS: Final = 0.01
"""The time for everything else between two looks at a long log that was not read to its end."""
REST: Final = 4
"""The pause between two looks is at least so many times as long as a look took."""
BEAT_SECONDS: Final = 10.0
"""A viewer hears something at least so often, so that it notices a lost connection."""
WRITE_SECONDS: Final = 20.0
"""A viewer that takes nothing for so long loses its connection."""
LEAVE_SECONDS: Final = 0.5
"""At its end the page waits so long for answers that are on their way."""
BACKLOG: Final = 128
MOST_VIEWERS: Final = 64
MOST_BODY: Final = 2**20


class Page:
    """The page of some runs. ``viewers`` is the number of streams that are open.

    ``find`` gives all run directories that there are now, in a thread: those that come later get a place on the page.
    ``are_starting`` says that a command has begun which will start the coordinators of ``directories``.
    Raises ConfigurationError if one of ``directories`` holds no run.
    """

    def __init__(
        self,
        directories: Iterable[Path],
        token: str,
        find: Callable[[], Iterable[Path]] = tuple,
        are_starting: bool = False,
    ) -> None:
        self.stream = Stream()
        self._runs = [
            LiveRun(number, directory, self.stream, are_starting) for number, directory in enumerate(directories)
        ]
        self._find = find
        self.token = token
        self._stories = Stories()
        self._door = Door()
        self._looked = 0.0
        self.viewers = 0
        self.left = time.monotonic()
        """When the last viewer left, by the monotonic clock."""

    def wanted(self, seconds: float) -> bool:
        """Whether there is something to see, and somebody watches or did so less than ``seconds`` ago."""
        # The directory of an experiment that could not begin is removed.
        return any(exists(run.directory) for run in self._runs) and (
            self.viewers > 0 or time.monotonic() - self.left < seconds
        )

    def note(self, has_command: bool) -> None:
        """Notice the coordinators that have come, and whether the command that starts them is still there.

        This has to be called a few times a second, also while nobody watches. Otherwise a coordinator may come and go,
        and its run would seem to begin only now.
        """
        for run in self._runs:
            run.note()
            run.is_starting = run.is_starting and has_command

    @asynccontextmanager
    async def served(self, listening: socket.socket) -> AsyncIterator[None]:
        """In this block the page is served at a socket, which is closed at its end."""
        runner = web.AppRunner(self._application(), access_log=None, shutdown_timeout=LEAVE_SECONDS)
        await runner.setup()
        answer = runner.server
        assert answer is not None
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: self._door.entered(answer()), sock=listening, backlog=BACKLOG)
        try:
            yield
        finally:
            server.close()
            await runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._door.attend, guard], client_max_size=MOST_BODY)
        application.on_response_prepare.append(add_headers)
        application.add_routes(
            [
                web.get("/", self._index),
                web.get("/style.css", self._style),
                web.get("/api/runs", self._list),
                web.get("/api/stream", self._follow),
                web.get(r"/api/runs/{run:\d+}/devices/{device:\d+}", self._device),
                web.post(r"/api/runs/{run:\d+}/break", self._break),
                web.static("/static", STATIC),
            ]
        )
        return application

    async def follow(self) -> None:
        """Look at the runs, and for new ones, as long as somebody watches. Ends only if it is cancelled."""
        await asyncio.gather(self._again(self._look, LOOK_SECONDS), self._again(self._look_for_more, FIND_SECONDS))

    async def _again(self, look: Callable[[], Awaitable[bool]], seconds: float) -> None:
        """Look again and again, with a pause of ``seconds``, or a longer one if a look takes long.

        The pause is short after a look that left something to be read. A look that the system refuses, such as one
        without a file left to open, is made up for by the next one.
        """
        while True:
            began, at_once = time.monotonic(), False
            if self.viewers:
                with suppress(OSError):
                    at_once = await look()
            await asyncio.sleep(TURN_SECONDS if at_once else max(seconds, REST * (time.monotonic() - began)))

    async def _look_for_more(self) -> bool:
        for directory in await asyncio.to_thread(lambda: list(self._find())):
            if all(run.directory != directory for run in self._runs):
                self._add(directory)
        return False

    def _add(self, directory: Path) -> None:
        """Give a run that has begun since its place. One whose settings can't be read yet is tried again later."""
        with suppress(ConfigurationError):
            run = LiveRun(len(self._runs), directory, self.stream)
            self._runs.append(run)
            self.stream.add("snapshot", run.snapshot())

    async def _look(self) -> bool:
        """Look once at each run. Returns whether more can be read at once."""
        self._looked = time.monotonic()
        for run in self._runs:
            run.look()
            await asyncio.sleep(0)
        return any(run.is_behind for run in self._runs)

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _style(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(STYLE)

    async def _list(self, request: web.Request) -> web.StreamResponse:
        return web.json_response([run.about() for run in self._runs])

    def _run(self, request: web.Request) -> LiveRun:
        number = int(request.match_info["run"][:9])
        if number >= len(self._runs):
            raise web.HTTPNotFound(reason="no such run")
        return self._runs[number]

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        if self.viewers >= MOST_VIEWERS:
            return told(503, f"{MOST_VIEWERS} viewers watch already; close another page")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        self.viewers += 1
        try:
            await response.prepare(request)
            if time.monotonic() - self._looked > LOOK_SECONDS:
                await self._look()
            while any(run.is_behind for run in self._runs):  # ``follow`` reads on
                await self.stream.news(LOOK_SECONDS)
            await self._send(response, request.headers.get("Last-Event-ID", ""))
        except OSError:
            pass  # the viewer went away, or takes nothing any more, or a run could not be looked at: it asks again
        finally:
            self.viewers -= 1
            self.left = time.monotonic()
        return response

    async def _send(self, response: web.StreamResponse, last: str) -> None:
        """Send a viewer what happens, from the message ``last`` on if it had one. A slow viewer gets snapshots."""
        stream = self.stream
        seen = stream.number_of(last)
        while True:
            frames: Iterable[bytes] | None = None if seen is None else stream.after(seen)
            seen = stream.last
            if frames is None:
                frames = self._snapshots(stream.id_of(seen))
            for part in frames or [b": \n\n"]:
                async with asyncio.timeout(WRITE_SECONDS):
                    await response.write(part)
            if stream.last == seen:
                await stream.news(BEAT_SECONDS)

    def _snapshots(self, id: str) -> Iterator[bytes]:
        """What all runs are, then their snapshots, each made when it is sent. A viewer goes on after the last one."""
        yield frame("runs", {"directories": [str(run.directory) for run in self._runs]})
        for run in self._runs:
            yield frame("snapshot", run.snapshot(), id if run is self._runs[-1] else "")

    async def _device(self, request: web.Request) -> web.StreamResponse:
        run, device = self._run(request), int(request.match_info["device"][:9])
        if device >= run.experiment.fleet.devices:
            return told(404, f"the run has {run.experiment.fleet.devices} devices")
        try:
            story = await self._stories.of(run, device)
        except FedemuError as error:
            return told(409, str(error))
        return web.json_response(story)

    async def _break(self, request: web.Request) -> web.StreamResponse:
        if not may_act(request, self.token):
            return told(403, "the token is wrong; the command that serves this page has printed it")
        run = self._run(request)
        wanted: Any = None
        with suppress(ValueError, RecursionError, web.HTTPException):  # hundreds of lists within each other
            wanted = json.loads(await request.read())
        if not isinstance(wanted, dict):
            return told(400, "the request is no JSON object")
        try:
            done = await breaking.act(run, wanted)
        except FedemuError as error:
            return told(409, str(error))
        await self._look()
        return web.json_response({"done": done})
