"""What `fedemu device` says, and where it keeps its state."""

import socket
from pathlib import Path

import pytest

from fedemu.device.machine.observer import MachineObserver
from fedemu.device.machine.supervisor import SupervisorPlan
from fedemu.ops.experiment import Runtime
from fedemu.ops.running import devices
from fedemu.ops.running.devices import Told
from fedemu.ops.running.together import places
from fedemu.protocol.errors import ConfigurationError


class Heard(MachineObserver):
    def __init__(self) -> None:
        self.counts: list[int] = []

    def devices(self, counts: object) -> None:
        self.counts.append(dict(counts)["connected"])  # type: ignore[call-overload]


def test_the_fleet_is_told_complete_once(capsys: pytest.CaptureFixture[str]) -> None:
    heard = Heard()
    told = Told(300, heard)
    for connected in (0, 100, 300, 299, 300):
        told.devices({"connected": connected, "starting": 300 - connected, "stopped": 0})
    assert capsys.readouterr().err == "300 devices connected\n"
    assert heard.counts == [0, 100, 300, 299, 300]


def test_devices_that_sleep_are_not_called_connected(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(300, Heard())
    for awake in (0, 7):
        told.devices({"connected": 300, "awake": awake, "starting": 0, "stopped": 0})
    assert capsys.readouterr().err == "300 devices; they sleep until they are asked\n"


def test_a_trainer_that_ended_is_told_and_a_device_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(300, MachineObserver())
    told.restarted("device")
    told.restarted("trainer")
    assert capsys.readouterr().err == "a trainer ended and is started again\n"


def test_a_coordinator_that_is_gone_is_told_and_that_it_is_back(capsys: pytest.CaptureFixture[str]) -> None:
    told = Told(2, MachineObserver())
    told.placed(2)
    told.lost(110.0)
    told.found()
    assert capsys.readouterr().err.splitlines() == [
        "the coordinator is gone; these devices look for it for 110 s",
        "the coordinator is back",
    ]


@pytest.mark.parametrize(
    ("outcome", "places", "code", "last"),
    [
        ("completed", 25, 0, "the run is over: completed"),
        ("completed", 20, 0, "5 of these 25 devices were superfluous; --n 20 is enough"),
        ("completed", 0, 0, "25 of these 25 devices were superfluous"),
        ("quorum", 25, 3, "the run is over: too few devices replied in every try of a round"),
        ("unreachable", 25, 3, "the run is over: not all devices of the experiment came in time"),
        (
            "interrupted",
            25,
            4,
            "the run is over: the coordinator was interrupted; start these devices again when it goes",
        ),
        ("failed", 25, 5, "the run is over: an error ended the coordinator"),
        ("stop", 25, 0, "the run is over: stop"),
    ],
)
def test_devices_end_with_the_outcome_of_the_run_and_its_code(
    outcome: str,
    places: int,
    code: int,
    last: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    async def supervise(plan: SupervisorPlan) -> str:
        plan.observer.placed(places)
        return outcome

    monkeypatch.setattr(devices, "supervise", supervise)
    assert devices.supervise_alone(25, Runtime(), tmp_path) == code
    assert capsys.readouterr().err.splitlines()[-1].startswith(last)


def test_a_host_that_does_not_resolve_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def unknown(host: str, port: str, **_: object) -> None:
        assert (host, port) == ("nosuch", "5555")
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigurationError, match=r"^the host 'nosuch' of tcp://nosuch:5555 cannot be found \(Name or"):
        devices.supervise_alone(1, Runtime(connect="tcp://nosuch:5555"), tmp_path)


@pytest.mark.parametrize("port", ["x", "-1", "5577/x", "99999", "0", ""])
def test_a_port_that_is_none_is_not_told_as_a_host_that_is_none(port: str) -> None:
    with pytest.raises(ConfigurationError, match="is not of the form tcp://HOST:PORT with a port from 1 to 65535"):
        devices.require_host(f"tcp://127.0.0.1:{port}")


@pytest.mark.parametrize("host", ["lab..example", "a" * 64])
def test_what_can_be_no_name_of_a_host_is_an_error_at_once(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be found \(this is no name of a host\)"):
        devices.supervise_alone(1, Runtime(connect=f"tcp://{host}:5555"), tmp_path)
    assert places(f"tcp://{host}:5555") == set()


def test_a_host_with_addresses_of_ipv6_only_is_to_stand_in_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd77::1", 5555, 0, 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, **_: found)
    devices.require_host("tcp://[lab]:5555")
    with pytest.raises(ConfigurationError, match=r"IPv6 only; write it in brackets: tcp://\[lab\]:5555$"):
        devices.require_host("tcp://lab:5555")
    found.append((socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 5555)))
    devices.require_host("tcp://lab:5555")


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5577", "tcp://[::1]:5577", "ipc:///tmp/there"])
def test_an_address_without_a_name_has_nothing_to_resolve(address: str) -> None:
    devices.require_host(address)


def test_a_coordinator_that_wants_keys_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    Told(2, MachineObserver()).barred("the coordinator wants keys")
    assert capsys.readouterr().err == "the coordinator wants keys; these devices go on trying\n"
