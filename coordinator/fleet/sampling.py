"""The draw of a cohort. It depends on the seed, the ask and the eligible devices, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.seeds import generator


def draw_cohort(
    eligible: Sequence[int] | NDArray[np.int64], count: int, *, seed: int, ask: AskId
) -> tuple[DeviceId, ...]:
    """``count`` of the eligible devices, or all if there are fewer. They are drawn without replacement.

    ``eligible`` is in index order, and so is the cohort.
    """
    if count >= len(eligible):
        return tuple(map(DeviceId, np.asarray(eligible).tolist()))
    random = generator(seed, round=ask.round, purpose=f"cohort/{ask.attempt}/{ask.ordinal}")
    places = random.choice(len(eligible), size=count, replace=False, shuffle=False)
    return tuple(map(DeviceId, np.asarray(eligible)[np.sort(places)].tolist()))
