"""Runs in network namespaces: a machine or an edge is cut off for longer than its peers wait for a sign of life."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemu.ops.stress.network import COORDINATOR, Weather, play_network
from fedemu.ops.stress.wires import Quality, why_not

QUALITY = Quality(0.02, 0.01, 1e6)


@pytest.mark.parametrize(
    "weather",
    [
        Weather("partition", "a machine is cut off, with loss and delay", QUALITY, ("first",), 12.0),
        Weather("above-edge", "an edge is cut off upwards", QUALITY, (COORDINATOR,), 12.0, edge=True),
    ],
    ids=["a machine", "an edge"],
)
def test_a_partition_that_heals_costs_time_and_no_digest(weather: Weather, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    [result] = play_network(tmp_path, [weather], rounds=10)
    assert result.passed, result.complaint
    assert result.seconds > 12.0
