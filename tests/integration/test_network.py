"""A run whose machines are in network namespaces: one is cut off for longer than its peers wait for a sign of life."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemu.ops.stress.network import Weather, play_network
from fedemu.ops.stress.wires import Quality, why_not


def test_a_partition_that_heals_costs_time_and_no_digest(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    weather = Weather("partition", "cut off, with loss and delay", Quality(0.02, 0.01, 1e6), ("first",), 12.0)
    [result] = play_network(tmp_path, [weather], rounds=10)
    assert result.passed, result.complaint
    assert result.seconds > 12.0
