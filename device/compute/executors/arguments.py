"""What the functions of a program take: tensors in named parts, which an executor passes as one flat list."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from torch import Tensor

from fedemu.algorithms.interface import Batch, Facts, Forest, LocalProgram, Tree
from fedemu.device.compute.executors.cohort import EACH, notes_of, unpacked


class Arguments(NamedTuple):
    """The tensors that one call of ``begin``, of a step or of ``finish`` takes, in parts.

    ``shared`` holds the leaves of the trees that all devices get, ``each`` those of the device's own part of the ask,
    ``own`` those of its own state, ``facts`` its packed facts, and ``key`` the key of what the call draws. A step also
    takes ``batch`` (x, y, weight and notes), ``noise`` and ``carry``; ``finish`` takes ``carry``. In a stack all
    tensors but the shared ones have a leading dimension for the devices.
    """

    shared: Sequence[Tensor]
    each: Sequence[Tensor]
    own: Sequence[Tensor]
    facts: Sequence[Tensor]
    key: Sequence[Tensor]
    batch: Sequence[Tensor] = ()
    noise: Sequence[Tensor] = ()
    carry: Sequence[Tensor] = ()

    def flat(self) -> list[Tensor]:
        """All tensors, part after part in the order of the fields. So the carry comes last."""
        return list(chain.from_iterable(self))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The number of tensors in each part."""
        return tuple(map(len, self))

    @classmethod
    def cut(cls, leaves: Sequence[Tensor], lengths: Sequence[int]) -> Arguments:
        """The inverse of ``flat``: a flat list in parts of these lengths."""
        rest = iter(leaves)
        return cls(*(list(islice(rest, length)) for length in lengths))

    def per_device(self, function: Callable[..., Tensor], *others: Arguments) -> Arguments:
        """Apply ``function`` to each tensor that is not shared, with the tensors at its place in ``others``."""
        together = zip(*(arguments[1:] for arguments in (self, *others)), strict=True)
        return Arguments(self.shared, *([function(*leaves) for leaves in zip(*part, strict=True)] for part in together))


@dataclass(frozen=True)
class Names:
    """The name of every tensor in the parts of ``Arguments``; a shared tensor has a key and a name."""

    shared: tuple[tuple[str, str], ...]
    each: tuple[str, ...]
    own: tuple[str, ...]
    noise: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, shared: Forest, each: Tree, own: Tree, program: LocalProgram) -> Names:
        """The names for a call of ``program`` with these trees."""
        return cls(
            tuple((key, name) for key, tree in shared.items() for name in tree),
            tuple(each),
            tuple(own),
            tuple(sorted(program.noise)),
            tuple(notes_of(program)),
        )

    def inputs(self, given: Arguments) -> tuple[Forest, Tree, Facts]:
        """The shared forest, the own state and the facts, in the form that programs take."""
        shared: dict[str, dict[str, Tensor]] = {}
        for (key, name), leaf in zip(self.shared, given.shared, strict=True):
            shared.setdefault(key, {})[name] = leaf
        if self.each:
            shared[EACH] = dict(zip(self.each, given.each, strict=True))
        return shared, dict(zip(self.own, given.own, strict=True)), unpacked(*given.facts)

    def read_only(self, given: Arguments) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a program must not write to, by the names that it has for them.

        Other devices or other calls read them, too. A batch, its noise and the carry belong to one call.
        """
        names = [
            *(f"shared[{key!r}][{name!r}]" for key, name in self.shared),
            *(f"shared[{EACH!r}][{name!r}]" for name in self.each),
            *(f"own[{name!r}]" for name in self.own),
            *("facts" for _ in given.facts),
        ]
        yield from zip(names, chain(given.shared, given.each, given.own, given.facts), strict=True)

    def batch(self, given: Arguments) -> Batch:
        """The batch of a step, with its notes by name."""
        x, y, weight, *notes = given.batch
        return Batch(x, y, weight, dict(zip(self.notes, notes, strict=True)))

    def drawn(self, given: Arguments) -> Tree:
        """The noise of a step, by name."""
        return dict(zip(self.noise, given.noise, strict=True))
