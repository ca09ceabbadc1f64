"""A method around another one: what it hands on of the method inside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic

from fedemu.algorithms.interface.program import LocalProgram, Query
from fedemu.algorithms.interface.script import Algorithm, Picturing, Remarking, S, Selecting
from fedemu.algorithms.interface.values import Tree
from fedemu.protocol.errors import ConfigurationError


class Around(Generic[S]):
    """The base of a method around the method ``inner``, in whose states the field ``inner`` is the state of ``inner``.

    It adds the programs ``asking``, of which errors say that ``whose`` a program of that name, such as ``replay has``.
    Raises ConfigurationError if ``inner`` has a program of the same name.
    """

    def __init__(self, inner: Algorithm[S], asking: Mapping[str, Query] | None = None, whose: str = "") -> None:
        added = asking or {}
        if taken := sorted(added.keys() & inner.programs.keys()):
            raise ConfigurationError(
                f"the method has a program {taken[0]!r}, but {whose} a program of that name; rename the method's"
            )
        self._inner = inner
        self.programs: Mapping[str, LocalProgram | Query] = {**inner.programs, **added}
        if isinstance(inner, Selecting):
            self.selection = inner.selection

    def variables(self, state: Any) -> Tree:
        return self._inner.variables(state.inner)

    def remarks(self, state: Any) -> Mapping[str, Any]:
        """The remarks of ``inner``; none if it makes none."""
        return self._inner.remarks(state.inner) if isinstance(self._inner, Remarking) else {}

    def pictures(self, state: Any, samples: int, seed: int) -> Tree:
        """The pictures of ``inner``; none if it makes none."""
        return self._inner.pictures(state.inner, samples, seed) if isinstance(self._inner, Picturing) else {}
