"""``fedemu completion``: what makes a shell complete the commands of fedemu, their options and their arguments."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer
from typer._completion_classes import completion_init
from typer._completion_shared import get_completion_script

from fedemu.ops.cli.guarded import guarded

VARIABLE = "_FEDEMU_COMPLETE"
"""The environment variable by which a shell asks ``fedemu`` what may follow the words on its command line."""

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
