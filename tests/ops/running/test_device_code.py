"""What an experiment wants of a machine."""

from __future__ import annotations

import pytest

from fedemu.device.machine.arrival import Ways
from fedemu.ops.experiment import Experiment
from fedemu.ops.running.device_code import ways


@pytest.mark.parametrize(
    ("fleet", "wanted"),
    [
        ({}, Ways({}, shares_link=False, sleeping=False)),
        ({"link": "shared"}, Ways({}, shares_link=True, sleeping=False)),
        ({"wake": "on-demand"}, Ways({}, shares_link=False, sleeping=True)),
    ],
)
def test_the_devices_of_a_machine_share_its_connection_or_sleep_as_the_experiment_says(
    fleet: dict[str, str], wanted: Ways
) -> None:
    assert ways(Experiment.parse({"fleet": fleet}).to_bytes()) == wanted
