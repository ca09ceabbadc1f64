"""A device's replay buffer, and what else it remembers of a period that it has not yet selected from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.data.partition import Indices
from fedemu.protocol.errors import DataError

_INDICES, _PERIODS, _STATE = "indices", "periods", "state"
_ANSWERED = "answered."
NEVER = -1


def _nothing() -> Indices:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class Buffer:
    """R_t: ``indices [k]`` into the training split and the ``periods [k]`` in which they came, in order of arrival.

    ``period`` is the first one that the device has not selected from, ``seen`` how many samples it had before that.
    ``answered`` is what the last question of that period left behind, and ``asked`` how many samples of the period had
    arrived by then; NEVER where there was none.
    """

    indices: Indices = field(default_factory=_nothing)
    periods: Indices = field(default_factory=_nothing)
    period: int = 0
    seen: int = 0
    asked: int = NEVER
    answered: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.indices)

    def to_arrays(self) -> dict[str, Any]:
        """All of it by name; ``answered`` as it is, in arrays or tensors."""
        return {
            _INDICES: self.indices,
            _PERIODS: self.periods,
            _STATE: np.array([self.period, self.seen, self.asked], dtype=np.int64),
            **{_ANSWERED + name: leaf for name, leaf in self.answered.items()},
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> Buffer:
        """The inverse of ``to_arrays``; raises DataError on anything that is no buffer."""
        try:
            indices, periods, state = (np.asarray(arrays[name]) for name in (_INDICES, _PERIODS, _STATE))
        except KeyError as error:
            raise DataError(f"the replay buffer lacks {error.args[0]}") from None
        if not _is_row(indices) or not _is_row(periods) or len(indices) != len(periods) or state.shape != (3,):
            raise DataError("the replay buffer's indices and periods are no two rows of the same length")
        period, seen, asked = (int(value) for value in state)
        answered = {name.removeprefix(_ANSWERED): leaf for name, leaf in arrays.items() if name.startswith(_ANSWERED)}
        return cls(indices, periods, period, seen, asked, answered)


def _is_row(array: NDArray[Any]) -> bool:
    return array.dtype == np.int64 and array.ndim == 1
