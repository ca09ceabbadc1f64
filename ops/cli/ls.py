"""``fedemu ls``: the runs of a folder, and how each of them stands."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.cli.shell import complete, options
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import Format
from fedemu.ops.figures import percent, readable_bytes, span
from fedemu.ops.results.listing import Listed, find, listed
from fedemu.ops.running.folder import RUNS
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import exists, is_folder
from fedemu.protocol.wording import counted

_TITLES = ("run", "method", "seed", "state", "rounds", "accuracy", "time", "ended (UTC)", "size", "digest")
_TO_THE_RIGHT = ("seed", "rounds", "accuracy", "time", "size")


@guarded
def ls(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A folder with runs, up to six levels below it. Default: runs.",
            show_default=False,
            autocompletion=complete.run_directories,
        ),
    ] = RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    format: options.FormatOption = Format.TEXT,
) -> int:
    """List the runs in a folder: state, rounds, accuracy, real time, end, size on the disk, and model digest.

    A run is running, completed, diverged, interrupted, failed, quorum (it had too few replies), unfinished (killed),
    not begun, or damaged.
    """
    if not is_folder(folder):
        what = "is no folder" if exists(folder) else "does not exist"
        raise ConfigurationError(f"{folder} {what}; name the folder of some runs")
    runs = [listed(directory) for directory in find(folder)]
    if as_json or format is Format.JSON:
        print(json.dumps([run.table() for run in runs]))
        return 0
    if not runs:
        print(f"there are no runs in {folder}", file=sys.stderr)
        return 0
    _print([_cells(run, folder) for run in runs])
    states = Counter(run.state for run in runs)
    told = ", ".join(f"{count} {state}" for state, count in states.most_common())
    size = readable_bytes(sum(run.size for run in runs))
    print(f"{counted(len(runs), 'run')}: {told}; {size}", file=sys.stderr)
    return 0


def _cells(run: Listed, folder: Path) -> dict[str, str]:
    place = run.directory.relative_to(folder) if run.directory != folder else run.directory
    rounds = "–" if run.rounds is None and run.of_rounds is None else f"{run.rounds or 0}/{_or(run.of_rounds, '?')}"
    return {
        "run": str(place),
        "method": _or(run.method),
        "seed": _or(run.seed),
        "state": run.state,
        "rounds": rounds,
        "accuracy": "–" if run.accuracy is None else percent(run.accuracy),
        "time": "–" if run.seconds is None else span(run.seconds),
        "ended (UTC)": "–" if run.ended is None else run.ended[:16].replace("T", " "),
        "size": readable_bytes(run.size),
        "digest": "–" if run.digest is None else run.digest[:12],
    }


def _or(value: object, other: str = "–") -> str:
    return other if value is None else str(value)


def _print(rows: Sequence[dict[str, str]]) -> None:
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in _TITLES}
    for row in [{title: title for title in _TITLES}, *rows]:
        cells = [
            row[title].rjust(widths[title]) if title in _TO_THE_RIGHT else row[title].ljust(widths[title])
            for title in _TITLES
        ]
        print("  ".join(_printable(cell) for cell in cells).rstrip())


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]
