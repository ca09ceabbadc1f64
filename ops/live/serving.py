"""Serves the live page of some runs until it is not needed any more, and tells people where it is."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from aiohttp.log import server_logger

from fedemu.ops.live.guards import is_own_fault
from fedemu.ops.live.server import Page
from fedemu.ops.terminal import WARNING, say
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import shortage
from fedemu.protocol.host.stopping import hearing_stop

HOST: Final = "127.0.0.1"
FIRST_PORT: Final = 8160
_TRIES: Final = 40
ASK_SECONDS: Final = 0.5
"""How often a page asks whether its command and its coordinator are there."""
LINGER_SECONDS: Final = 20.0
"""After the end of its command a page is served until it has had no viewer for so long."""


def serve_page(
    directories: Sequence[Path],
    port: int | None,
    opened: Callable[[str, str], None],
    parent: int | None = None,
    find: Callable[[], Iterable[Path]] = tuple,
) -> None:
    """Serve the page of these run directories. ``opened`` is told its address and the token of its buttons.

    Those that ``find`` gives later, among all that there are then, come to the page as they begin.
    Without a ``port`` a free one is taken. The page is served until a stop signal comes. With a ``parent``, the command
    that starts the coordinator, it is served until that process has ended and nobody has watched for a while. Raises
    ConfigurationError if a directory holds no run, or if the port can't be used.
    """
    server_logger.addFilter(is_own_fault)
    page = Page(directories, secrets.token_hex(8), find, are_starting=parent is not None)
    asyncio.run(_serve(page, _bind(port), opened, parent))


async def _serve(page: Page, listening: socket.socket, opened: Callable[[str, str], None], parent: int | None) -> None:
    number = listening.getsockname()[1]
    stopped = asyncio.Event()
    asyncio.get_running_loop().set_exception_handler(_told_once())
    with hearing_stop(lambda name: stopped.set()):
        following = asyncio.create_task(page.follow())
        try:
            async with page.served(listening):
                opened(f"http://{HOST}:{number}/", page.token)
                while not stopped.is_set() and not following.done():
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stopped.wait(), ASK_SECONDS)
                    if parent is not None:
                        page.note(has_command := not _is_gone(parent))
                        if not has_command and not page.wanted(LINGER_SECONDS):
                            break
        finally:
            following.cancel()
    if following.done() and not following.cancelled():
        following.result()


def _told_once() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """A handler of errors of an event loop. If no file can be opened for a further connection, it says so once."""
    told: set[str] = set()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        lacking = shortage(error) if isinstance(error, OSError) else ""
        if not lacking:
            loop.default_exception_handler(context)
        elif lacking not in told:
            told.add(lacking)
            say(f"{WARNING}a connection to the page has to wait: {lacking}")

    return handle


def _bind(port: int | None) -> socket.socket:
    """A socket that listens on the loopback, at ``port`` or at the first free one."""
    refused = OSError()
    wanted = [port] if port is not None else [*range(FIRST_PORT, FIRST_PORT + _TRIES), 0]
    for number in wanted:
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, number))
            listening.listen(128)
        except OSError as error:
            listening.close()
            refused = error
            continue
        return listening
    if port is None or refused.errno == errno.EADDRNOTAVAIL:
        raise ConfigurationError(f"the page can't be served at {HOST}: {refused.strerror}") from refused
    raise ConfigurationError(f"port {port} can't be used: {refused.strerror}; name another one") from refused


def _is_gone(process: int) -> bool:
    return os.getppid() != process


def main(words: Sequence[str]) -> int:
    """The page of ``fedemu run --page``. ``words`` are the parent's process id, a descriptor, and the run directory.

    The address and the token are written to the descriptor, one line each; or a single line, which says why there is
    no page.
    """
    parent, far_end, directory = int(words[0]), os.fdopen(int(words[1]), "w", encoding="utf-8"), Path(words[2])

    def opened(address: str, token: str) -> None:
        with far_end:
            far_end.write(f"{address}\n{token}\n")

    try:
        serve_page([directory], None, opened, parent)
    except ConfigurationError as error:
        if far_end.closed:  # the page was served until now
            raise
        with far_end:
            far_end.write(" ".join(str(error).splitlines()))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
