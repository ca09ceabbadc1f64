"""What some of the replies to an ask add up to. Partial sums of several groups merge to what all together add up to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.interface import Reducer
from fedemu.coordinator.sums.digits import Digits, Packed
from fedemu.coordinator.sums.leaf import Leaf
from fedemu.coordinator.sums.rounding import rounded
from fedemu.coordinator.sums.terms import ELEMENTS, PAYLOADS, Block, parts_of
from fedemu.protocol.errors import ConfigurationError

RULE: Final = "exact"
"""The rule by which replies are added, as checkpoints name it. Earlier versions, which rounded, named none."""
_BLOCK = Block()
Arrays = Mapping[str, NDArray[Any]]
"""One payload, by wire name ``key/leaf``. A bfloat16 leaf is the uint16 of its bits."""


@dataclass(frozen=True)
class PackedPartial:
    """A partial sum as plain values. ``sums`` are by key of the reply and name of the leaf, ``key/leaf``.

    Its size depends on the payload's values, but not on the number of replies: float32 values of a usual model take
    three or four places of four bytes, and any values at most ten.
    """

    replies: int
    examples: int
    sums: Mapping[str, Packed]


def reduced_leaves(
    reducers: Mapping[str, Reducer], leaves: Mapping[str, Leaf]
) -> dict[str, dict[str, tuple[str, Leaf]]]:
    """For each key of the reply, by the leaf's name: its name in the payload, and its form.

    ``leaves`` is the form of a payload. Raises ConfigurationError if it has no tensors for a reducer.
    """
    found = {}
    for key, reducer in reducers.items():
        prefix = f"{reducer.key or key}/"
        found[key] = {
            name.removeprefix(prefix): (name, leaf) for name, leaf in leaves.items() if name.startswith(prefix)
        }
        if not found[key]:
            known = dict.fromkeys(repr(name.partition("/")[0]) for name in leaves)
            raise ConfigurationError(
                f"the algorithm reduces the key {prefix[:-1]!r} by {reducer.kind}, but the payload has no tensors "
                f"under this key; it has {', '.join(known) or 'none at all'}"
            )
    return found


class Partial:
    """The exact sums over some replies, for all reducers but ``collect``.

    ``replies`` is the number of replies, ``examples`` that of their examples. The value does not depend on the order
    and the grouping of ``fold`` and ``merge``, and not on the machine. A ``weighted_mean`` counts a reply without
    examples only if no reply has any; then it is the even mean.
    """

    def __init__(self, reducers: Mapping[str, Reducer], leaves: Mapping[str, Leaf]) -> None:
        """An empty sum. ``leaves`` is the form of a payload.

        Raises ConfigurationError if a payload has no tensors for a reducer.
        """
        self.replies = 0
        self.examples = 0
        self._reducers = {key: reducer for key, reducer in reducers.items() if reducer.kind != "collect"}
        self._leaves = {key: found for key, found in reduced_leaves(reducers, leaves).items() if key in self._reducers}
        self._sums = {
            key: {name: Digits(leaf.size) for name, (_, leaf) in found.items()} for key, found in self._leaves.items()
        }

    def fold(self, payloads: Sequence[Arrays], examples: Sequence[int]) -> None:
        """Add replies with their numbers of examples. Several at once are faster than one after the other."""
        for start in range(0, len(payloads), PAYLOADS):
            self._fold(payloads[start : start + PAYLOADS], examples[start : start + PAYLOADS])

    def merge(self, other: Partial) -> None:
        """Add the sum over other replies to the same ask."""
        for key, reducer in self._reducers.items():
            if reducer.kind == "weighted_mean" and not other._weighs(self.examples):
                continue
            if reducer.kind == "weighted_mean" and not self._weighs(other.examples):
                self._clear(key)
            for name, digits in self._sums[key].items():
                digits.merge(other._sums[key][name])
        self.replies += other.replies
        self.examples += other.examples

    def finish(self) -> dict[str, dict[str, NDArray[Any]]]:
        """The reduced values by key of the reply and name of the leaf, each rounded once. Raises ValueError if empty.

        An integer is rounded half to even, and saturates. A bool counts as 0 or 1: a mean is the majority, a total says
        whether any was true. A bfloat16 leaf is the uint16 of its bits.
        """
        if not self.replies:
            raise ValueError("a sum of 0 payloads has no value")
        result: dict[str, dict[str, NDArray[Any]]] = {}
        for key, reducer in self._reducers.items():
            weighted = reducer.kind == "weighted_mean" and self.examples
            divisor = 1 if reducer.kind == "total" else self.examples if weighted else self.replies
            result[key] = {
                name: rounded(self._sums[key][name], divisor, leaf.dtype).reshape(leaf.shape)
                for name, (_, leaf) in self._leaves[key].items()
            }
        return result

    def pack(self) -> PackedPartial:
        """The sum as plain values. Equal sums have equal ones."""
        sums = {f"{key}/{name}": digits.pack() for key, name, digits in self._all()}
        return PackedPartial(self.replies, self.examples, sums)

    def unpack(self, packed: PackedPartial) -> Partial:
        """The sum that was packed, of the same reducers and leaves as this one.

        Raises ValueError if it does not fit them, as one of a foreign sender may.
        """
        found = copy(self)
        found.replies, found.examples = packed.replies, packed.examples
        names = {f"{key}/{name}" for key, name, _ in self._all()}
        if differing := names ^ packed.sums.keys():
            raise ValueError(f"a sum of other tensors: it differs in {min(differing)!r}")
        found._sums = {
            key: {name: _unpacked(f"{key}/{name}", leaf, packed.sums) for name, (_, leaf) in leaves.items()}
            for key, leaves in self._leaves.items()
        }
        return found

    def _fold(self, payloads: Sequence[Arrays], examples: Sequence[int]) -> None:
        count = sum(examples)
        for key, reducer in self._reducers.items():
            weights = list(examples)
            if reducer.kind != "weighted_mean" or not (self.examples or count):
                weights = [1] * len(payloads)
            elif not self.examples:
                self._clear(key)
            chosen = [(payload, weight) for payload, weight in zip(payloads, weights, strict=True) if weight]
            if chosen:
                for name, (sent, leaf) in self._leaves[key].items():
                    arrays = [payload[sent].reshape(-1) for payload, _ in chosen]
                    self._add(self._sums[key][name], leaf.dtype, arrays, [weight for _, weight in chosen])
        self.replies += len(payloads)
        self.examples += count

    def _add(self, digits: Digits, dtype: str, arrays: Sequence[NDArray[Any]], weights: Sequence[int]) -> None:
        most, weight_parts = 0, parts_of(weights)
        for start in range(0, digits.size, ELEMENTS):
            parts = [array[start : start + ELEMENTS] for array in arrays]
            terms = 0
            for term in _BLOCK.sum(dtype, parts, weight_parts):
                digits.add(term.units, term.exponent, start)
                terms += 1
            most = max(most, terms)
        digits.added(most)

    def _weighs(self, others: int) -> bool:
        """Whether these replies count in a weighted mean together with replies that have ``others`` examples."""
        return self.examples > 0 or others == 0

    def _clear(self, key: str) -> None:
        """Forget replies without examples, because there are others now."""
        self._sums[key] = {name: Digits(digits.size) for name, digits in self._sums[key].items()}

    def _all(self) -> Iterator[tuple[str, str, Digits]]:
        for key, of_key in self._sums.items():
            for name, digits in of_key.items():
                yield key, name, digits


def _unpacked(name: str, leaf: Leaf, sums: Mapping[str, Packed]) -> Digits:
    lowest, digits = sums[name]
    if digits.dtype != np.int32 or digits.ndim != 2 or digits.shape[1] != leaf.size:
        raise ValueError(f"the sum of {name} has the shape {digits.shape}, for {leaf.size} elements")
    if "float" not in leaf.dtype and lowest < 0:
        raise ValueError(f"the sum of {name} has digits below the point, but {leaf.dtype} has none")
    return Digits.unpack(sums[name])
