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


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the cache: ``FEDEMU_CACHE``, or ``fedemu`` in the user's cache folder.

    Raises ConfigurationError if there is no such home folder.
    """
    return named_folder(environment, "FEDEMU_CACHE", "XDG_CACHE_HOME", ".cache", "fedemu")


def state_folder(environment: Mapping[str, str]) -> Path:
    """The folder for the state of devices: ``FEDEMU_STATE``, or ``fedemu`` in the user's state folder.

    Raises ConfigurationError if there is no such home folder.
    """
    return named_folder(environment, "FEDEMU_STATE", "XDG_STATE_HOME", ".local/state", "fedemu")


def keys_folder(environment: Mapping[str, str]) -> Path:
    """The folder of this machine's keys: ``FEDEMU_KEYS``, or ``fedemu/keys`` in the user's configuration.

    Raises ConfigurationError if there is no such home folder.
    """
    return named_folder(environment, "FEDEMU_KEYS", "XDG_CONFIG_HOME", ".config", "fedemu/keys")


def named_folder(environment: Mapping[str, str], name: str, variable: str, below: str, inside: str) -> Path:
    """The folder that the variable ``name`` names, or else ``inside`` in the user's folder of such things.

    That one is named by ``variable``, such as ``XDG_CACHE_HOME``, or is ``below`` in the home folder. Raises
    ConfigurationError if there is no home folder.
    """
    if chosen := environment.get(name):
        return expanded(chosen)
    if base := environment.get(variable):
        return Path(base) / inside
    try:
        return Path.home() / below / inside
    except RuntimeError:  # a container may run as a user without a name
        raise ConfigurationError(f"this user has no home folder; set {name}, or HOME") from None
