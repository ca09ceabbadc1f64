"""The source of code that settings name: its files, with the modules that it imports from beside it, and their digest.

Nothing is imported. What is installed, or comes with Python or fedemu, does not count as beside.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Final

from fedemu.protocol.code.own_code import is_own
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.ids import Digest, digest_of

MOST_FILES: Final = 10_000
"""The most files that the source of one place has. More are a mistake, such as a package in a folder of data."""


def digest_of_source(place: str) -> Digest:
    """The SHA-256 of the files of a place, whose names count as well if they are several.

    Raises ConfigurationError if there is no such file.
    """
    files = files_of(place)
    if len(files) == 1:
        return digest_of(next(iter(files.values())).read_bytes())
    whole = hashlib.sha256()
    for name, file in sorted(files.items()):
        content = file.read_bytes()
        whole.update(f"{name}\0{len(content)}\0".encode())
        whole.update(content)
    return Digest(whole.hexdigest())


def files_of(place: str) -> dict[str, Path]:
    """The files of a place, by names that are the same on every machine.

    They are the file of a module, or all Python files of a package; the packages around it; and the user's own modules
    that any of these files imports by an import statement, wherever it stands.
    """
    main = source_of(place)
    files, package = {"": main}, ""
    if not place.endswith(".py"):
        package = place if main.name == "__init__.py" else place.rpartition(".")[0]
        if main.name == "__init__.py":
            files = {file.relative_to(main.parent).as_posix(): file for file in main.parent.rglob("*.py")}
    found = {file.resolve() for file in files.values()}
    waiting = [(file, _package_of(place, package, name)) for name, file in files.items()]
    if package:
        _add(package, files, found, waiting)
    while waiting:
        file, around = waiting.pop()
        for module in _imports(file, around):
            _add(module, files, found, waiting)
        if len(files) > MOST_FILES:
            raise ConfigurationError(
                f"{place} has more than {MOST_FILES} files of source; put it into a smaller folder"
            )
    return files


def source_of(place: str) -> Path:
    """The file from which a place would be imported. Raises ConfigurationError if there is none."""
    if place.endswith(".py"):
        if not is_file(Path(place)):
            raise ConfigurationError(no_file(place))
        return Path(place)
    specs = dict(_specs(place))
    spec = specs.get(place)
    if spec is None:
        raise ConfigurationError(f"there is no module {place!r}, neither installed nor in {os.getcwd()}")
    if spec.origin is None or not is_file(Path(spec.origin)):
        raise ConfigurationError(f"the module {place!r} has no source file")
    return Path(spec.origin)


def no_file(place: str) -> str:
    """Says that there is no file, and in which folder it was looked for."""
    return f"there is no Python file {place}{'' if Path(place).is_absolute() else f' in {os.getcwd()}'}"


def look_here() -> None:
    """Have Python look for modules in the working folder, too, after all other places."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)


def interpreter() -> list[str]:
    """The beginning of the command of a new process that runs a module of fedemu.

    By itself Python would look into the working folder first, where a file may have the name of any module. The new
    process does so only where this one found fedemu there.
    """
    here = Path(__file__).resolve().parents[3] == Path.cwd()
    return [sys.executable] if here else [sys.executable, "-P"]


def _add(module: str, files: dict[str, Path], found: set[Path], waiting: list[tuple[Path, str]]) -> None:
    """Add the files that an import of ``module`` would run, if they are the user's own and were not found before.

    Those whose imports are to be looked at are ``waiting``, each with the package in which it stands.
    """
    for name, spec in _specs(module):
        if not spec.has_location or spec.origin is None:
            continue
        file = Path(spec.origin)
        if not is_own(spec.origin) or not is_file(file):
            return
        if file.resolve() not in found:
            found.add(file.resolve())
            files[f"import {name}"] = file
            waiting.append((file, name if file.name == "__init__.py" else name.rpartition(".")[0]))


def _imports(file: Path, package: str) -> Iterator[str]:
    """The modules that the statements of a file import. Some may be attributes, of which there is no module."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # it is an extension, or the import will fail and say why
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*filter(None, around), *([node.module] if node.module else [])])
            if base:
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def _package_of(place: str, package: str, name: str) -> str:
    """The package in which a file of a place stands, for its relative imports."""
    inner = Path(name).parent.as_posix().replace("/", ".")
    return package if package != place or inner == "." else f"{package}.{inner}"


def _specs(module: str) -> Iterator[tuple[str, ModuleSpec]]:
    """What Python would import for ``module``: the packages around it, the outermost first, and itself.

    It ends early at a part that is not found. Unlike ``importlib.util.find_spec`` it imports nothing.
    """
    look_here()
    folders, name = None, ""
    for part in module.split("."):
        if name and folders is None:
            return  # what should hold the next part is no package
        name = f"{name}.{part}" if name else part
        specs = (finder.find_spec(name, folders) for finder in sys.meta_path if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None:
            return
        yield name, spec
        folders = spec.submodule_search_locations
