"""What a shell offers to complete: presets and their parts, experiment files, run directories, keys of settings.

Each function for that gets what was typed so far, and returns whole words. None of them imports anything that takes
long. ``fedemu completion`` prints what makes a shell ask.

bash and zsh put such a word on the command line as it is, and zsh reads it as a program before. So no word is offered
that a shell would not take as it stands. Where nothing is offered, shells complete names of files by themselves, and
quote them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.experiment.presets import JOINT, names_in, part_names, preset_names
from fedemu.ops.homes import expanded
from fedemu.ops.sweeps.plan import SWEEPS
from fedemu.ops.sweeps.suite import SUITES
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file

_RUN_FILES = ("config.toml", "metrics.jsonl")
"""A folder with one of these is a run directory."""
VARIABLE = "_FEDEMU_COMPLETE"
"""The environment variable by which a shell asks ``fedemu`` what may follow the words on its command line."""

_PLAIN: Final = re.compile(r"[\w.,+@%=/~:-]*")
"""Words that mean themselves in every shell. A file may be called ``$(command).toml``."""
_NO_FILE: Final = ("-", "~", "=")
"""A word that begins with one of these may be an option, a home folder or, in zsh, a command, and no name of a file."""
_NO_SPACE = """\
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[/=] ]]; then compopt -o nospace; fi
    return 0
"""
"""Lets bash put no space behind a folder or a key, after which the word goes on."""


class Shell(StrEnum):
    """The shells that can be made to complete."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@guarded
def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> int:
    """Print a script for a shell, which then completes commands, options, presets, parts and run directories.

    Put the line of the example into ~/.bashrc. For zsh put it into ~/.zshrc, after compinit, with zsh in place of bash.
    For fish: fedemu completion fish > ~/.config/fish/completions/fedemu.fish
    """
    script = get_completion_script(prog_name="fedemu", complete_var=VARIABLE, shell=shell.value)
    print(script.replace("    return 0\n", _NO_SPACE) if shell is Shell.BASH else script)
    return 0


def offer() -> None:
    """Make the answers to shells possible. Does nothing if no shell asks."""
    if VARIABLE in os.environ:
        completion_init()


def presets(incomplete: str) -> list[str]:
    """Presets, and parts after a ``+``."""
    before, joint, _ = incomplete.rpartition(JOINT)
    known = [f"{before}{JOINT}{part}" for part in part_names()] if joint else preset_names()
    return _beginning(incomplete, known)


def presets_and_parts(incomplete: str) -> list[str]:
    """What ``fedemu presets`` can print: presets, parts alone, and parts after a ``+``."""
    return presets(incomplete) + ([] if JOINT in incomplete else _beginning(incomplete, part_names()))


def experiments(incomplete: str) -> list[str]:
    """Presets, TOML files and the folders that lead to them."""
    return presets(incomplete) + toml_files(incomplete)


def sweeps(incomplete: str) -> list[str]:
    """Sweeps that come with fedemu, presets, TOML files and folders."""
    return _beginning(incomplete, names_in(SWEEPS)) + experiments(incomplete)


def suites(incomplete: str) -> list[str]:
    """Suites that come with fedemu, TOML files and folders."""
    return _beginning(incomplete, names_in(SUITES)) + toml_files(incomplete)


def methods(incomplete: str) -> list[str]:
    """Preset parts, TOML files and folders."""
    return _beginning(incomplete, part_names()) + toml_files(incomplete)


def toml_files(incomplete: str) -> list[str]:
    """TOML files, and folders."""
    return [path for path in _paths(incomplete) if path.endswith((".toml", os.sep))]


def run_directories(incomplete: str) -> list[str]:
    """Run directories, and folders that lead to them."""
    return [
        path.rstrip(os.sep) if any(is_file(Path(path, name)) for name in _RUN_FILES) else path
        for path in _paths(incomplete)
        if path.endswith(os.sep)
    ]


def overrides(incomplete: str) -> list[str]:
    """Keys of settings for ``--set``, with the equals sign."""
    from fedemu.ops.experiment import Experiment
    from fedemu.ops.experiment.mistakes import setting_paths
    from fedemu.ops.experiment.sources import machine_paths

    keys = [*setting_paths(Experiment), *machine_paths()]
    return _beginning(incomplete, [f"{key}=" for key in keys])


def _beginning(incomplete: str, known: Iterable[str]) -> list[str]:
    return [name for name in known if name.startswith(incomplete) and _PLAIN.fullmatch(name)]


def _paths(incomplete: str) -> Iterator[str]:
    """The files and folders that begin with what was typed. Folders end with a slash; hidden ones only if asked for.

    Those whose path a shell would have to quote are left out.
    """
    folder, slash, start = incomplete.rpartition(os.sep)
    try:
        base = expanded(folder + slash) if slash else Path()
        entries = sorted(os.scandir(base), key=lambda entry: entry.name)
    except (OSError, ConfigurationError):
        return
    for entry in entries:
        path = f"{folder}{slash}{entry.name}{os.sep if entry.is_dir() else ''}"
        is_asked_for = entry.name.startswith(start) and (start.startswith(".") or not entry.name.startswith("."))
        if is_asked_for and _PLAIN.fullmatch(path) and (slash or not path.startswith(_NO_FILE)):
            yield path
