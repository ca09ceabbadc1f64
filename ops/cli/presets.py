"""``fedemu presets``, ``init`` and ``schema``: experiments that come with fedemu, one to start from, and their keys."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.at_hand import Needed, needed, where_looked
from fedemu.ops.cli.shell import complete, options
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import Format
from fedemu.ops.experiment.near import did_you_mean
from fedemu.ops.experiment.presets import (
    LISTED,
    example_of,
    is_preset,
    kind_of,
    methods,
    part_names,
    part_table,
    preset,
    preset_names,
)
from fedemu.ops.experiment.presets import presets as shipped
from fedemu.ops.experiment.printed import printed
from fedemu.ops.experiment.starter import STARTER, starter_text
from fedemu.ops.experiment.toml_text import SCHEMA_FILE
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.files import usable, write_for_people
from fedemu.protocol.host.paths import exists, is_file, is_folder


@guarded
def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Print this preset as TOML, such as churn, or one with parts, such as digits+wsm, or a part. "
            "Default: list all.",
            show_default=False,
            autocompletion=complete.presets_and_parts,
        ),
    ] = None,
    format: options.FormatOption = Format.TEXT,
) -> int:
    """List the experiments and methods that come with fedemu, and which of their data are here; or print one of them.

    What is printed of a preset is a complete experiment, which can be saved and run; a part is some settings of one.
    """
    if name is not None:
        return _print_one(name, format)
    settings, added = shipped(), methods()
    data = {preset_name: needed(preset(preset_name), os.environ) for preset_name, _ in settings}
    if format is Format.JSON:
        listed = [
            {
                "name": name,
                "kind": "experiment",
                "description": text,
                "needs": data[name].names,
                "missing": data[name].missing,
            }
            for name, text in settings
        ]
        print(json.dumps([*listed, *({"name": name, "kind": "method", "description": text} for name, text in added)]))
        return 0
    _list(settings, added, data)
    return 0


def _list(settings: list[tuple[str, str]], added: list[tuple[str, str]], data: dict[str, Needed]) -> None:
    width = max(len(name) for name, _ in (*settings, *added))
    for name, text in settings:
        if not data[name].missing:
            print(f"{name:<{width}}  {text}")
    print(f"\nData at hand: {', '.join(_unique(data, missing=False))}. Looked in: {where_looked(os.environ)}.")
    if lacking := _unique(data, missing=True):
        print(f"Not here: {', '.join(lacking)}. These presets need them (docs/data.md tells where they come from):\n")
        for name, text in settings:
            if data[name].missing:
                print(f"{name:<{width}}  {text}")
    print("\nMethods. Write one or several of them after an experiment, each after a +, as in digits+wsm:\n")
    for name, text in added:
        print(f"{name:<{width}}  {text}")
    print("\n`fedemu presets NAME` prints one of them, and `fedemu init --from NAME` begins an experiment like it.")


def _unique(data: dict[str, Needed], *, missing: bool) -> list[str]:
    """The names of all data that are missing, or of all that are there, each once."""
    lacking = {name for each in data.values() for name in each.missing}
    wanted = [name for each in data.values() for name in each.names]
    return [name for name in dict.fromkeys(wanted) if (name in lacking) == missing]


def _print_one(name: str, format: Format) -> int:
    text = printed(name)
    if format is Format.TEXT:
        print(text, end="")
        return 0
    if name in part_names():
        print(json.dumps({"name": name, "kind": kind_of(name), "example": example_of(name), "table": part_table(name)}))
        return 0
    table = preset(name)
    data = needed(table, os.environ)
    print(
        json.dumps(
            {"name": name, "kind": "experiment", "needs": data.names, "missing": data.missing, "experiment": table}
        )
    )
    return 0


@guarded
def init(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="The file to write. It must not exist yet.", autocompletion=complete.toml_files
        ),
    ] = Path("experiment.toml"),
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="PRESET",
            help="Begin with the settings of this preset, such as digits+wsm.",
            autocompletion=complete.presets,
        ),
    ] = STARTER,
) -> int:
    """Write a commented experiment to start from: every table, with its most used settings and their defaults.

    As it is written it runs in seconds. Prints the path of the file.
    """
    if is_folder(file):
        raise ConfigurationError(f"{file} is a folder; name a file in it, such as {file / 'experiment.toml'}")
    if exists(file) or file.is_symlink():
        raise ConfigurationError(f"{file} exists, and is not overwritten; name another file")
    if not is_preset(source) and source not in part_names() and "+" not in source:
        hint = did_you_mean(source, preset_names(), 3) or f"; {LISTED}"
        raise ConfigurationError(f'--from "{source}" is no preset{hint}')
    text = starter_text(source, str(file))
    _write(file, text)
    print(file)
    quoted = shlex.quote(f"./{file}" if str(file).startswith("-") else str(file))
    print(f"check it with: fedemu validate {quoted}\nrun it with:   fedemu run {quoted}", file=sys.stderr)
    beside = file.parent / SCHEMA_FILE
    if not exists(beside):
        print(f"editors explain its keys after: fedemu schema --out {shlex.quote(str(beside))}", file=sys.stderr)
    return 0


@guarded
def schema(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"The file to write, such as {SCHEMA_FILE} beside an experiment. Default: print it.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Print the JSON Schema of experiments (draft 2020-12), by which editors complete and explain keys.

    `fedemu init` and `fedemu presets NAME` write the line by which Taplo and Even Better TOML find it beside the file.
    """
    # Imported here, because it takes a tenth of a second, for which no other command should have to wait.
    from fedemu.ops.experiment.schema import TITLE
    from fedemu.ops.experiment.schema import schema as made

    text = json.dumps(made(), indent=2) + "\n"
    if out is None:
        print(text, end="")
        return 0
    if is_folder(out):
        raise ConfigurationError(f"{out} is a folder; name a file in it, such as {out / SCHEMA_FILE}")
    mark = f'"title": "{TITLE}"'
    if exists(out) and not (is_file(out) and mark in _beginning(out)):
        raise ConfigurationError(f"{out} exists, is no schema of fedemu, and is not overwritten; name another file")
    _write(out, text)
    print(out)
    return 0


def _beginning(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as opened:
        return opened.read(1000)


def _write(file: Path, text: str) -> None:
    """Write a file that the user has named, whole or not at all."""
    with usable(file, "name another file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_for_people(file, text)
