"""How the processes of one machine find each other."""

import pytest

from fedemu.ops.running.together import reachable


@pytest.mark.parametrize(
    ("bind", "connect"),
    [
        ("tcp://0.0.0.0:5577", "tcp://127.0.0.1:5577"),
        ("tcp://*:5577", "tcp://127.0.0.1:5577"),
        ("tcp://[::]:5577", "tcp://[::1]:5577"),
        ("tcp://10.0.0.7:5577", "tcp://10.0.0.7:5577"),
    ],
)
def test_devices_of_this_machine_reach_a_wildcard_address_by_loopback(bind: str, connect: str) -> None:
    assert reachable(bind) == connect
