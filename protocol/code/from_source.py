"""Imports the user's own modules from their source, also where compiled files of them lie.

Python takes a compiled file if the time of the source, in seconds, and its size are those that the file notes. After a
quick change, or a copy that keeps the time, both may be. Other code would run than that whose digest the run records.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any

from fedemu.protocol.code.own_code import is_own


class FromSource(SourceFileLoader):
    """Loads a file of Python. A compiled one is neither read nor written."""

    def path_stats(self, path: Any) -> Mapping[str, Any]:
        """Without the time of the source, Python looks for no compiled file."""
        raise OSError("this source is compiled anew")


class _OwnFinder(MetaPathFinder):
    """Finds what the finders after it find. The user's own files get another loader."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and type(spec.loader) is SourceFileLoader and is_own(spec.loader.path):
            spec.loader = FromSource(spec.loader.name, spec.loader.path)
        return spec


_FINDER = _OwnFinder()


def import_own_from_source() -> None:
    """From now on this process imports the user's own modules from their source."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
