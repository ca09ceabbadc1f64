"""The commands about keys, which let machines join a coordinator and keep strangers out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedemu.ops.cli.shell import options
from fedemu.ops.cli.shell.guarded import guarded
from fedemu.ops.cli.shell.options import Format
from fedemu.ops.keys.store import KeyFolder, read_public
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import exists, is_folder

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name for the other machine.", show_default=False)]


@guarded
def new(keys: options.Keys = None) -> int:
    """Make the pair of keys of this machine, and print the public key.

    The secret key stays here. A coordinator and the devices of this machine use the same pair.
    """
    folder = _folder(keys)
    print(folder.new())
    print(
        f"the public key above is in {folder.public_file}; other machines may have it\n"
        f"the secret key is in {folder.secret_file}; it stays on this machine",
        file=sys.stderr,
    )
    return 0


@guarded
def show(keys: options.Keys = None, format: options.FormatOption = Format.TEXT) -> int:
    """Show the public key of this machine, and the machines that its coordinators let in."""
    folder = _folder(keys)
    own = folder.pair()[0] if exists(folder.secret_file) else None
    approved = folder.approved()
    if format is Format.JSON:
        print(
            json.dumps(
                {"folder": str(folder.path), "public_key": own, "approved": approved, "edges": folder.edges()}, indent=2
            )
        )
        return 0
    edges = folder.edges()
    print(f"keys in {folder.path}")
    width = max(map(len, ("this machine", *approved)))
    print(f"  {'this machine':{width}}  {own or f'none; make a key with `fedemu keys new{folder.option}`'}")
    for name, key in approved.items():
        print(f"  {name:{width}}  {key}  approved{' as an edge' if name in edges else ''}")
    if not approved:
        print(f"  no other machine is approved; `fedemu keys approve NAME KEY{folder.option}` lets one in")
    return 0


@guarded
def approve(
    name: Name,
    key: Annotated[
        str,
        typer.Argument(
            metavar="KEY", help="Its public key between single quotes, or the file with it.", show_default=False
        ),
    ],
    edge: Annotated[bool, typer.Option("--edge", help="It may be an edge, and so speak for other machines.")] = False,
    keys: options.Keys = None,
) -> int:
    """Let a machine join the coordinators and edges of this machine, also a run that is on.

    An edge is trusted with sums of what its devices compute, and decides itself which machines it lets in.
    """
    folder = _folder(keys)
    before = folder.approved().get(name)
    folder.approve(name, public := read_public(key), edge)
    how = " as an edge" if edge else ""
    instead = " with another key than before" if before not in (None, public) else ""
    print(f"{name} is approved{how}{instead}: {public}")
    return 0


@guarded
def revoke(name: Name, keys: options.Keys = None) -> int:
    """Take the approval of a machine back. A run that is on stops listening to it within a second."""
    print(f"{name} is not approved any more: {_folder(keys).revoke(name)}")
    return 0


def _folder(named: Path | None) -> KeyFolder:
    folder = KeyFolder.of("" if named is None else str(named), os.environ)
    if exists(folder.path) and not is_folder(folder.path):
        raise ConfigurationError(f"{folder.path} is no folder; name that of the keys with --keys")
    return folder


COMMANDS = (
    ("new", new, "Make the keys of this machine.", ("fedemu keys new",)),
    ("list", show, "Show this machine's public key, and who is approved.", ("fedemu keys list",)),
    (
        "approve",
        approve,
        "Let a machine in.",
        (
            "fedemu keys approve lab2 lab2.key",
            "fedemu keys approve site1 site1.key --edge",
            "fedemu keys approve lab2 'wwo8tNL}W0iW{cg6SkXf)4HMa)rNW6tMSpHcD08#'",
        ),
    ),
    ("revoke", revoke, "Shut a machine out.", ("fedemu keys revoke lab2",)),
)
"""The commands below ``fedemu keys``: name, function, summary and examples of each."""

EXAMPLES = (
    "fedemu keys new                        # once on each machine: it prints the public key",
    "fedemu keys approve lab2 'PUBLIC KEY'  # at the coordinator: lab2 may join",
    "fedemu keys list                       # this machine's public key, and who may join",
    "fedemu keys revoke lab2                # shut lab2 out, also during a run",
)
"""Those of ``fedemu keys`` itself."""
