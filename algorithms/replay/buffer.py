"""A device's replay buffer: which samples it holds, and what it remembers of the next period to select from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.flat import Indices
from fedemu.protocol.errors import DataError

_INDICES, _PERIODS, _STATE = "indices", "periods", "state"
_ANSWERED = "answered."
_NOTES = "notes."
NEVER = -1
"""The value of ``Buffer.asked`` before the first question about a period."""


def _nothing() -> Indices:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Buffer:
    """The replay buffer R_t: ``indices [k]`` into the training split, in order of arrival.

    ``periods [k]`` are the periods in which the samples came. ``period`` is the first period that the device has not
    selected from, and ``seen`` the number of samples that it had before that period. ``answered`` is what the last
    question about that period left behind, and ``asked`` the number of samples of the period that had arrived by then,
    NEVER if there was no question. ``notes`` are kept beside the samples, each ``[k, ...]``.
    """

    indices: Indices = field(default_factory=_nothing)
    periods: Indices = field(default_factory=_nothing)
    period: int = 0
    seen: int = 0
    asked: int = NEVER
    answered: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.indices)

    def to_arrays(self) -> dict[str, Any]:
        """The buffer as arrays by name. ``answered`` and ``notes`` stay as they are, in arrays or tensors."""
        return {
            _INDICES: self.indices,
            _PERIODS: self.periods,
            _STATE: np.array([self.period, self.seen, self.asked], dtype=np.int64),
            **{_ANSWERED + name: leaf for name, leaf in self.answered.items()},
            **{_NOTES + name: leaf for name, leaf in self.notes.items()},
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> Buffer:
        """The inverse of ``to_arrays``. Raises DataError if the arrays are no buffer."""
        try:
            indices, periods, state = (np.asarray(arrays[name]) for name in (_INDICES, _PERIODS, _STATE))
        except KeyError as error:
            raise DataError(f"the replay buffer lacks {error.args[0]}") from None
        if not _is_row(indices) or not _is_row(periods) or len(indices) != len(periods) or state.shape != (3,):
            raise DataError(
                f"the replay buffer has indices of the shape {list(indices.shape)} and periods of the shape "
                f"{list(periods.shape)}; both must be int64 rows of the same length, with a state of 3 numbers"
            )
        period, seen, asked = (int(value) for value in state)
        answered, notes = (
            {name.removeprefix(start): leaf for name, leaf in arrays.items() if name.startswith(start)}
            for start in (_ANSWERED, _NOTES)
        )
        if any(leaf.shape[:1] != indices.shape for leaf in notes.values()):
            raise DataError(f"the replay buffer of {len(indices)} samples has notes of another number of samples")
        return cls(indices, periods, period, seen, asked, answered, notes)


def _is_row(array: NDArray[Any]) -> bool:
    return array.dtype == np.int64 and array.ndim == 1
