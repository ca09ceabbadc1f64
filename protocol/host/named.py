"""Loads code that settings name as ``module:attribute`` or ``path/to/file.py:attribute``. No other place does this."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.own_code import account


def load(name: str) -> Any:
    """Import the module or the file in ``name``, and return its attribute.

    A module is looked up as Python does it; the working folder comes last. Raises ConfigurationError if the name has
    another form, if the import fails for any reason, or if the module has no such attribute.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigurationError(f"{name!r} is not of the form module:attribute")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{place!r} can't be imported: {account(error)}") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ConfigurationError(f"{place} has no {attribute!r}{_elsewhere(module)}") from None


def _elsewhere(module: ModuleType) -> str:
    """The file of a module that is not in the working folder: it may hide one of the same name that is."""
    file = getattr(module, "__file__", None)
    return "" if file is None or Path(file).parent == Path.cwd() else f"; this module is {file}"


def _from_module(place: str) -> ModuleType:
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    return importlib.import_module(place)


def _from_file(path: Path) -> ModuleType:
    """The module of a file. A file is imported once per process, under a name of its own."""
    name = f"fedemu_file_{path.resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.is_file():
            raise FileNotFoundError(f"there is no Python file {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
