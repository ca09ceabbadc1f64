"""A run in network namespaces: an edge and a machine behind it are cut off for longer than others wait for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fedemu.ops.stress.network import COORDINATOR, Weather, play_network
from fedemu.ops.stress.warm import WarmStart
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


@pytest.fixture
def _permitted() -> None:
    try:
        Wires(["a"], Quality()).close()
    except ConfigurationError as reason:
        pytest.skip(str(reason))


@pytest.mark.usefixtures("_permitted")
def test_partitions_that_heal_cost_time_and_no_digest(tmp_path: Path, warm: WarmStart) -> None:
    [result] = play_network(tmp_path, [WEATHER], rounds=4, warm=warm)
    assert result.passed, result.complaint
    assert result.seconds > CUT_SECONDS


@pytest.mark.usefixtures("_permitted")
def test_namespaces_end_with_the_process_that_made_them() -> None:
    code = (
        "import signal; from fedemu.ops.stress.wires import Quality, Wires; wires = Wires(['a', 'b'], Quality())\n"
        "print(*(wires.inside(name)[2] for name in 'ab'), flush=True); signal.pause()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        keepers = [psutil.Process(int(pid)) for pid in maker.stdout.readline().split()]
        own = os.stat("/proc/self/ns/net").st_ino
        assert len({own, *(os.stat(f"/proc/{keeper.pid}/ns/net").st_ino for keeper in keepers)}) == 3
        maker.kill()
    psutil.wait_procs(keepers, timeout=10.0)
    assert not any(keeper.is_running() and keeper.status() != psutil.STATUS_ZOMBIE for keeper in keepers)


def test_without_the_command_ip_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"^network namespaces need the command ip; install iproute2$"):
        Wires(["a"], Quality())
