"""Paths that begin with a home folder: ``~``, ``~NAME``, and a user's folders for data, state, cache and settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fedemu.protocol.errors import ConfigurationError


def expanded(path: str | Path) -> Path:
    """The path with the home folder in place of ``~`` or ``~NAME``. Raises ConfigurationError if there is none.

    ``./~`` is a name in the working folder.
    """
    if not str(path).startswith("~"):
        return Path(path)
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise ConfigurationError(
            f"{path} begins with ~, and this machine knows no such home folder; write the whole path"
        ) from None


def data_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder in which data sets are looked for first, that of ``FEDEMU_DATA``. None if the variable is not set.

    Raises ConfigurationError as ``expanded`` does.
    """
    chosen = environment.get("FEDEMU_DATA")
    return expanded(chosen) if chosen else None


def user_folder(environment: Mapping[str, str], variable: str, below: str, instead: str) -> Path:
    """The user's folder that ``variable`` names, such as ``XDG_CACHE_HOME``, or else ``below`` in the home folder.

    Raises ConfigurationError if there is no home folder. Then ``instead`` is the variable of fedemu to set.
    """
    if base := environment.get(variable):
        return Path(base)
    try:
        return Path.home() / below
    except RuntimeError:  # a container may run as a user without a name
        raise ConfigurationError(f"this user has no home folder; set {instead}, or HOME") from None
