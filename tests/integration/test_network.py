"""A run in network namespaces: an edge and a machine behind it are cut off for longer than others wait for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemu.ops.stress.network import COORDINATOR, Weather, play_network
from fedemu.ops.stress.wires import Quality, Wires
from fedemu.protocol.errors import ConfigurationError

CUT_SECONDS = 12.0
WEATHER = Weather(
    name="above-and-below-edge",
    what="an edge is cut off upwards, and from a machine behind it, with loss and delay",
    quality=Quality(delay=0.02, loss=0.01, rate=1e6),
    cut=(COORDINATOR, "first"),
    seconds=CUT_SECONDS,
    edge=True,
)


def test_partitions_that_heal_cost_time_and_no_digest(tmp_path: Path) -> None:
    try:
        Wires(["a"], Quality()).close()
    except ConfigurationError as reason:
        pytest.skip(str(reason))
    [result] = play_network(tmp_path, [WEATHER], rounds=6)
    assert result.passed, result.complaint
    assert result.seconds > CUT_SECONDS


def test_without_the_command_ip_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^network namespaces need the command ip; install iproute2$"):
        Wires(["a"], Quality())
