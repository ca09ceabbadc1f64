"""What `fedemu device` says, and where it keeps its state."""

from pathlib import Path

import pytest

from fedemu.device.machine.observer import Silent
from fedemu.ops.running.devices import Told, state_folder


class Heard(Silent):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def devices(self, counts: object) -> None:
        self.counts.append(dict(counts)["connected"])  # type: ignore[call-overload]


def test_the_fleet_is_told_complete_once(capsys: pytest.CaptureFixture[str]) -> None:
    heard = Heard()
    told = Told(heard)
    for connected in (0, 100, 300, 299, 300):
        told.devices({"connected": connected, "starting": 300 - connected, "stopped": 0})
    assert capsys.readouterr().err == "300 devices connected\n"
    assert heard.counts == [0, 100, 300, 299, 300]


def test_a_trainer_that_ended_is_told_and_a_device_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(Silent())
    told.restarted("device")
    told.restarted("trainer")
    assert capsys.readouterr().err == "a trainer ended and is started again\n"


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"FEDEMU_STATE": "/var/fleet", "XDG_STATE_HOME": "/x"}, Path("/var/fleet")),
        ({"XDG_STATE_HOME": "/x"}, Path("/x/fedemu")),
        ({}, Path.home() / ".local" / "state" / "fedemu"),
    ],
)
def test_state_is_kept_where_the_environment_says_or_where_the_user_keeps_state(
    environment: dict[str, str], folder: Path
) -> None:
    assert state_folder(environment) == folder
