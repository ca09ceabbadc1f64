"""The trackers by name, and whether a name can be used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fedemu.ops.extras import require
from fedemu.ops.homes import expanded
from fedemu.ops.track.tracker import Tracker
from fedemu.protocol.code.named import load
from fedemu.protocol.errors import ConfigurationError


class Kind(NamedTuple):
    """Where a tracker is, and which module its extra brings."""

    place: str
    needs: str


KINDS: Mapping[str, Kind] = {
    "tensorboard": Kind("fedemu.ops.track.tensorboard:TensorBoard", "tensorboardX"),
    "mlflow": Kind("fedemu.ops.track.mlflow:MLflow", "mlflow"),
    "wandb": Kind("fedemu.ops.track.wandb:WeightsAndBiases", "wandb"),
}


def check(names: Iterable[str], out: str = "") -> None:
    """Raise ConfigurationError if one of ``names`` is no tracker, or if its extra is not installed.

    Also if there are several, and ``out`` is an address, of which only one of them can be.
    """
    names = dict.fromkeys(names)
    if len(names) > 1 and "://" in out:
        raise ConfigurationError(
            f"{without_password(out)} is the address of one tracker, and {len(names)} are named; name one, or give a "
            "folder, in which each writes into one of its own"
        )
    for name in names:
        if name in KINDS:
            require(KINDS[name].needs, name, f"tracking to {name}", f"leave {name} out of track.to")
        elif ":" not in name:
            raise ConfigurationError(
                f'there is no tracker "{name}"; choose from {", ".join(KINDS)}, or name your own as module:Name'
            )
        else:
            load(name)


def places(names: Iterable[str], out: str) -> dict[str, str]:
    """Where each tracker writes: at ``out``, or if there are several, each in a folder of its own there."""
    names = dict.fromkeys(names)
    out = whole(out)
    if len(names) < 2 or not out:
        return dict.fromkeys(names, out)
    return {name: str(Path(out) / file_name(name)) for name in names}


def whole(out: str) -> str:
    """``out`` as a whole path, which names the same place from every working folder. An address stays as it is."""
    return str(expanded(out).resolve()) if out and "://" not in out else out


def without_password(out: str) -> str:
    """``out`` for people: in an address, ``...`` stands for the password."""
    return re.sub(r"(://[^/@:]*):[^/]*@", r"\1:...@", out)


def file_name(name: str) -> str:
    """The name of a tracker as that of a file."""
    return name if name in KINDS else re.sub(r"[^\w.-]+", "-", name).strip("-.")


def tracker(name: str) -> Tracker:
    """A new tracker. Raises ConfigurationError if there is none of this name."""
    check([name])
    made: Callable[[], Tracker] = load(KINDS[name].place if name in KINDS else name)
    return made()
