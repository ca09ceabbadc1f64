"""What a device says of its samples, held against what its stream has brought it."""

from __future__ import annotations

import numpy as np
import pytest

from fedemu.algorithms.streams.arrivals import Arrivals
from fedemu.coordinator.asks.holdings import Holdings
from fedemu.coordinator.asks.payload import PayloadError
from fedemu.protocol.ids import DeviceId

LABELS = np.array([0, 1, 1, 2, 0, 1, 2])
ARRIVALS = Arrivals(
    offsets=np.array([0, 4, 7]),
    indices=np.array([0, 1, 2, 3, 4, 5, 6]),
    periods=np.array([0, 0, 1, 1, 0, 0, 0]),
    seconds=np.zeros(7),
    period_count=2,
)
FIRST, SECOND = DeviceId(0), DeviceId(1)


@pytest.mark.parametrize(
    ("device", "task", "examples", "counts", "reason"),
    [
        (FIRST, 0, 2, None, None),
        (FIRST, 0, 3, None, "examples"),
        (FIRST, 1, 4, None, None),
        (FIRST, 1, 5, None, "examples"),
        (SECOND, 0, 3, None, None),
        (SECOND, 1, 2**52, None, "examples"),
        (FIRST, 0, 2, (1, 1, 0), None),
        (FIRST, 0, 2, (2, 0, 0), "label_counts"),
        (FIRST, 1, 3, (0, 2, 1), None),
        (FIRST, 1, 3, (0, 1, 2), "label_counts"),
    ],
)
def test_a_device_has_no_more_than_its_stream_has_brought_it(
    device: DeviceId, task: int, examples: int, counts: tuple[int, ...] | None, reason: str | None
) -> None:
    holdings = Holdings(ARRIVALS, LABELS, classes=3)
    if reason is None:
        holdings.check(device, task, examples, counts)
        return
    with pytest.raises(PayloadError, match="the stream has brought this device") as caught:
        holdings.check(device, task, examples, counts)
    assert caught.value.reason == reason
