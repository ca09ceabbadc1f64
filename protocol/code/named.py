"""Loads code that settings name as ``module:attribute`` or ``path/to/file.py:attribute``. No other place does this.

A process whose experiment came over the network is restricted: it loads only the places that whoever runs it has
allowed, and only if their source has the digest that the experiment names. A place is a module or a file.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from fedemu.protocol.code.from_source import FromSource, import_own_from_source
from fedemu.protocol.code.own_code import account
from fedemu.protocol.code.source import digest_of_source, look_here, no_file
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.ids import Digest

SHOWN = 12
"""The number of digits of a digest that people are shown."""

CELLS = Path("fedemu-cells")
"""The folder, in the working folder, with files of what a notebook's cells or a script have defined."""

_WITH_A_HOME = (type, FunctionType, BuiltinFunctionType, MethodType, type(functools.cache(len)))
"""What tells in which module it was defined: classes, and functions of several kinds. Other values do not."""
_NAME = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|.+\.py):[A-Za-z_]\w*")

_allowed: frozenset[str] | None = None
_digests: Mapping[str, Digest] = {}


def restrict(allowed: Iterable[str] | None) -> None:
    """From now on this process loads only the ``allowed`` places, with the digests of ``expect``. Nothing undoes this.

    Call it before an experiment is looked at that came over the network. None restricts nothing: the experiment is that
    of the user of this machine.
    """
    global _allowed
    if allowed is not None:
        _allowed = frozenset(allowed) if _allowed is None else _allowed & frozenset(allowed)


def is_restricted() -> bool:
    """Whether this process got its experiment over the network."""
    return _allowed is not None


def expect(digests: Mapping[str, Digest]) -> None:
    """The digests that an experiment names, by place. They count in a restricted process alone."""
    global _digests
    _digests = dict(digests)


def is_open(place: str) -> bool:
    """Whether this process may load a place, if its source has the right digest. Paths of one file are one place."""
    return _allowed is None or place in _allowed or any(_same_file(place, known) for known in _allowed)


def load(name: str) -> Any:
    """Import the module or the file in ``name``, and return its attribute.

    A module, also one that a file imports, is looked up as Python does it; the working folder comes last. Raises
    ConfigurationError if the name has another form, if the import fails for any reason, or if the module has no such
    attribute. In a restricted process, it raises it also if the place is not allowed, has another source, or has the
    attribute from another module.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ConfigurationError(f"{name!r} is not of the form module:attribute")
    require(place)
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_module(place)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{place!r} can't be imported: {account(error)}{_looked_in(place, error)}") from error
    try:
        found = getattr(module, attribute)
    except AttributeError:
        hints = f"{_elsewhere(module)}{_near(module, attribute)}"
        raise ConfigurationError(f"{place} has no {attribute!r}{hints}") from None
    if _allowed is not None:
        _require_own(place, module, attribute, found)
    return found


def require(place: str) -> None:
    """In a restricted process, raise ConfigurationError unless ``place`` is allowed and has the expected digest."""
    if _allowed is None:
        return
    if not is_open(place):
        raise ConfigurationError(
            f"the coordinator's experiment names code that does not come with fedemu, {place}, and this machine was "
            f"not told to run it; read it, and start these devices with --allow-code {place}"
        )
    if place not in _digests:
        raise ConfigurationError(
            f"the coordinator's experiment names {place} without the digest of its source; either it "
            "has no source file, or the coordinator runs an earlier version of fedemu"
        )
    found = digest_of_source(place)
    if found != _digests[place]:
        raise ConfigurationError(
            f"{place} is not the same here as at the coordinator: its source, with the modules that it imports from "
            f"beside it, has the digest {found[:SHOWN]}... here and {_digests[place][:SHOWN]}... there; give both "
            "machines the same files"
        )


def is_name(text: str) -> bool:
    """Whether a text has the form of a name that ``load`` takes."""
    return _NAME.fullmatch(text) is not None


def place_of(name: str) -> str:
    """The place in ``place:attribute``. A place alone is returned as it is."""
    return name.rpartition(":")[0] or name


def without_cells(name: str) -> str:
    """The name of code as tables of people show it: of what a notebook or a script has defined its own name alone."""
    place, _, attribute = name.rpartition(":")
    return attribute if Path(place).parent == CELLS else name


def _require_own(place: str, module: ModuleType, attribute: str, found: Any) -> None:
    """Raise ConfigurationError for what a module has imported: its source is not that of the module."""
    if not isinstance(found, _WITH_A_HOME):
        return
    home = found.__module__ or "nowhere"
    if home != module.__name__ and not home.startswith(f"{module.__name__}."):
        raise ConfigurationError(
            f"{place} has {attribute!r} from {home}, and only what {place} itself defines is allowed; "
            "define it there, or name it where it is defined"
        )


def _same_file(place: str, known: str) -> bool:
    return place.endswith(".py") and known.endswith(".py") and Path(place).resolve() == Path(known).resolve()


def _looked_in(place: str, error: BaseException) -> str:
    """Where a module was looked for that was not found."""
    if not isinstance(error, ModuleNotFoundError) or error.name != place.partition(".")[0]:
        return ""
    return f"; it was looked for in PYTHONPATH and in the working folder, {Path.cwd()}"


def _near(module: ModuleType, attribute: str) -> str:
    """The attribute of a module that is most like one that it does not have. Empty if none is like it."""
    found = difflib.get_close_matches(attribute, [name for name in vars(module) if not name.startswith("_")], 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _elsewhere(module: ModuleType) -> str:
    """The file of a module that is not in the working folder: it may hide one of the same name that is."""
    file = getattr(module, "__file__", None)
    return "" if file is None or Path(file).parent == Path.cwd() else f"; this module is {file}"


def _from_module(place: str) -> ModuleType:
    look_here()
    if place.partition(".")[0] != "fedemu":
        import_own_from_source()
    return importlib.import_module(place)


def _from_file(path: Path) -> ModuleType:
    """The module of a file. A file is imported once per process, under a name of its own."""
    look_here()
    import_own_from_source()
    name = f"fedemu_file_{path.resolve()}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path, loader=FromSource(name, str(path)))
        if spec is None or spec.loader is None or not is_file(path):
            raise FileNotFoundError(no_file(str(path)))
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
