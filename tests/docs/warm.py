"""A process that has imported all that ``fedemu`` needs, and forks for every command of a page.

A page has many short runs, and most of their time is the import of torch. ``python warm.py SOCKET`` is the server. A
client sends its arguments, folder, environment and its three streams, and gets the exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from fedemu.ops.pages import parts
from fedemu.ops.pages.parts import Draw, bound
from fedemu.ops.stress.warm_process import Blanks, start_from
from fedemu.protocol.host.garbage import settle

DONE = "-- done --"
IMPORTED = (
    "torch",
    "matplotlib.pyplot",
    "datasets",
    "pandas",
    "fontTools.subset",
    "matplotlib.backends.backend_pdf",
    "matplotlib.backends.backend_svg",
    "PIL.PngImagePlugin",
    "scipy.stats",
    "fedemu.ops.assembly.rehearsal",
    "fedemu.ops.cli.__main__",
    "fedemu.ops.cli.commands",
    "fedemu.ops.compare.latex.table",
    "fedemu.ops.compare.page.page",
    "fedemu.ops.report.report",
    "fedemu.ops.running.coordinator",
    "fedemu.ops.running.devices",
    "fedemu.ops.running.embedded",
    "fedemu.ops.running.together",
)
MOST_ROUNDS = 2
"""Runs of pages stop after this number of rounds, whatever ``--rounds`` says."""
MOST_EPOCHS = 5
"""Devices in memory train no more epochs, whatever ``--set local.epochs`` says. A real fleet that a page kills does."""
CHOOSING = ("fedemu.ops.compare.page.page", "fedemu.ops.report.figures")
"""The modules that choose pictures. Of each kind the commands of pages draw the first as a file for a paper, and all of
them together one for a page. Other tests draw them all."""
SPARE = {"fedemu": 1, "blocks": 8}
"""How many processes of fedemu a program can start that have everything imported, too. Further ones are ordinary."""
SPARE_OF_A_FLEET = 2
"""The same for a fleet of real processes, which begins with a coordinator and a supervisor."""
CLIENT = """#!{python} -SEs
import json, os, socket, sys
line = socket.socket(socket.AF_UNIX)
line.connect({address!r})
asked = json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(line, [len(asked).to_bytes(4, "big")], [0, 1, 2])
line.sendall(asked)
sys.exit(int(line.recv(16) or 137))
"""
"""The program of the commands ``fedemu`` and ``blocks`` (of Python). It sends its name and its work to the server."""


def serve(address: str) -> None:
    """Fork a child for each connection, until SIGTERM ends this process."""
    for module in IMPORTED:
        importlib.import_module(module)
    for module in CHOOSING:
        choosing: Any = importlib.import_module(module)
        choosing.bound = _first_bound
    parts.drawn = _first_of_all(parts.drawn)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    settle()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        while True:
            line, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _answer(line)
            line.close()


def _answer(line: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(line, 4, 3)
    asked = bytearray()
    while len(asked) < int.from_bytes(size, "big"):
        asked += line.recv(65536)
    name, words, folder, environment = json.loads(asked)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, folder)
    code = 1
    try:
        fleet = environment.get("FEDEMU_RUNTIME__TRANSPORT") == "zmq"
        start_from(Blanks(SPARE_OF_A_FLEET if fleet else SPARE[name]))
        if name == "blocks":
            _execute_files()
        else:
            sys.argv = [name, *(words if fleet else _shortened(words))]
            from fedemu.ops.cli.__main__ import main

            main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        line.send(str(code).encode())
        os._exit(code)


def _first_bound(plots: Mapping[str, Callable[[Any], Any]], data: Any) -> dict[str, Draw]:
    return dict(islice(bound(plots, data).items(), 1))


def _first_of_all(drawn: Callable[..., Any]) -> Callable[..., Any]:
    """``drawn``, which returns None as for a picture without data when it has drawn one."""
    pictures: list[object] = []

    def draw_once(draw: Draw) -> Any:
        picture = None if pictures else drawn(draw)
        pictures.extend([] if picture is None else [picture])
        return picture

    return draw_once


def _shortened(words: list[str]) -> list[str]:
    """A command line with at most ``MOST_ROUNDS`` rounds, ``MOST_EPOCHS`` epochs, and two of a range of seeds."""
    return [_shorter(before, word) for before, word in zip(["", *words], words, strict=False)]


def _shorter(option: str, word: str) -> str:
    if option == "--rounds":
        return str(min(int(word), MOST_ROUNDS))
    if seeds := re.fullmatch(r"(\d+)-\d+", word if option == "--seeds" else ""):
        return f"{seeds[1]}-{int(seeds[1]) + 1}"
    if epochs := re.fullmatch(r"local\.epochs=(\d+)", word if option == "--set" else ""):
        return f"local.epochs={min(int(epochs[1]), MOST_EPOCHS)}"
    return word


def _execute_files() -> None:
    """Execute the files that the lines of stdin name. What a file defines stays defined for the files after it."""
    names: dict[str, object] = {}
    for line in sys.stdin:
        names = runpy.run_path(line.rstrip("\n"), names)
        print(DONE, flush=True)


def install(folder: Path, address: str, python: str) -> None:
    """Put the commands ``fedemu`` and ``blocks`` into a folder that goes first in PATH."""
    for name in ("fedemu", "blocks"):
        (folder / name).write_text(CLIENT.format(python=python, address=address))
        (folder / name).chmod(0o755)


if __name__ == "__main__":
    serve(sys.argv[1])
