"""Whether machines compute alike: only then does a run give the same bits, whichever machine computes what.

The first machine of a run sets the way. Whoever sends no ``Compute``, such as a foreign device, is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from fedemu.protocol.messages import Compute

_VERSIONS: Final = ("fedemu", "torch", "numpy")
_PROCESSOR: Final = ("processor", "instructions")
_GPU: Final = ("gpus", "cuda", "driver")
MOST_WAYS: Final = 256
"""The most ways that are remembered, because every checkpoint holds all of them."""


class Way(NamedTuple):
    """A way to compute, and the name of the first machine that has it."""

    host: str
    compute: Compute


@dataclass
class Likeness:
    """The ways in which the machines of a run compute, in the order in which they came.

    ``portable`` says that the run has the same bits on all processors, and uses no GPU. ``mixed`` allows several ways.
    Once anything may have been computed, the ways are ``settled``: a machine that leaves takes its way with it before,
    and not after.
    """

    portable: bool = False
    mixed: bool = False
    ways: list[Way] = field(default_factory=list)
    settled: bool = False

    @property
    def mixes(self) -> bool:
        """Whether results depend on which machine computed what."""
        return any(self.difference(way.compute) for way in self.ways)

    def refusal(self, compute: Compute | None, host: str) -> str:
        """Why the machine ``host`` may not take part, and what to do; empty if it may."""
        if self.mixed or compute is None or not (difference := self.difference(compute)):
            return ""
        first = self.ways[0].host if self.ways else "the others"
        return (
            f"{host or 'it'} would compute otherwise than {first} does in this run: {difference}; use machines "
            "and versions that are alike, or compute.portable = true in a new run if only processors differ, or allow "
            "it with --set runtime.mixed_compute=true where the coordinator is started."
        )

    def forget_others(self, present: Iterable[Way]) -> None:
        """Keep only the ways of those that are ``present``, in the order in which they came, unless it is settled."""
        if not self.settled:
            self.ways.clear()
            for way in present:
                self.note(way.compute, way.host)

    def note(self, compute: Compute | None, host: str) -> str:
        """Remember a machine that takes part. Returns in what it differs from the first, empty if in nothing."""
        if compute is None:
            return ""
        if self.portable:  # a GPU that may be there has no part in it
            compute = replace(compute, device="cpu", gpus=(), cuda="", driver="")
        difference = self.difference(compute)
        is_new = all(_differences(compute, way.compute, self.portable) for way in self.ways)
        if is_new and len(self.ways) < MOST_WAYS:
            self.ways.append(Way(host, compute))
        return difference

    def difference(self, compute: Compute) -> str:
        """In what a machine computes otherwise than the first, in words; empty if in nothing."""
        if len(compute.gpus) > 1 and compute.device == "cuda" and not self.portable:
            return f"its GPUs are of several models ({', '.join(compute.gpus)})"
        return ", ".join(_differences(compute, self.ways[0].compute, self.portable)) if self.ways else ""

    def to_record(self) -> list[dict[str, Any]]:
        """The ways in the form of JSON, each with its ``host``."""
        return [{"host": way.host, **msgspec.to_builtins(way.compute)} for way in self.ways]

    def restore(self, record: Iterable[Mapping[str, Any]]) -> None:
        """Take what ``to_record`` gave, perhaps in a later version, which may know more facts."""
        for entry in record:
            facts = {name: entry[name] for name in Compute.__struct_fields__ if name in entry}
            self.ways.append(Way(str(entry["host"]), msgspec.convert(facts, Compute)))
            self.settled = True


def _differences(one: Compute, other: Compute, portable: bool) -> list[str]:
    """What ``one`` has and what ``other`` has instead, for each fact that changes results.

    A trainer on a GPU uses nothing else. A coordinator computes on the processor (``device``), and may have a GPU, too.
    """
    compared = list(_VERSIONS)
    if not portable:
        on_gpu = "cuda" in (one.device, other.device)
        compared += ["device", *(() if on_gpu else _PROCESSOR)]
        compared += _GPU if on_gpu or one.gpus or other.gpus else ()
    found = []
    for name in compared:
        here, there = _shown(getattr(one, name)), _shown(getattr(other, name))
        if here != there:
            found.append(f"{name} {here} instead of {there}")
    return found


def _shown(fact: str | tuple[str, ...]) -> str:
    return (fact if isinstance(fact, str) else ", ".join(fact)) or "unknown"
