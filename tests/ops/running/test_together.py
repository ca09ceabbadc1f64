"""How the processes of one machine find each other."""

import asyncio
import re
import signal
from pathlib import Path

import pytest

from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.runtime import Track
from fedemu.ops.running import coordinator, together
from fedemu.ops.running.codes import STOP_SIGNALS
from fedemu.ops.running.launch_rules import Launch
from fedemu.ops.running.together import reachable, require_metrics_ports, run_together
from fedemu.ops.running.words import at_address
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.stopping import hearing_stop


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


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The words that both sides of the run are to get, by name: their commands, and what they read. None is started."""
    given: dict[str, list[str]] = {}

    def launch(commands: dict[str, list[str]], *rest: object, told: dict[str, str], **more: object) -> Launch:
        given.update(
            {child: [*command, *([told[child]] if child in told else [])] for child, command in commands.items()}
        )
        given["all can read"] = [word for command in commands.values() for word in command]
        return Launch(exit_code=2)

    monkeypatch.setattr(together, "launch", launch)
    return given


@pytest.mark.parametrize(
    ("asked", "address"),
    [({}, r"ipc://.+/fedemu-private-.+/coordinator"), ({"bind": Runtime().bind}, r"tcp://127\.0\.0\.1:5577")],
)
def test_a_run_opens_a_port_only_if_an_address_is_asked_for(
    asked: dict[str, str], address: str, tmp_path: Path, launched: dict[str, list[str]]
) -> None:
    run_together(tmp_path, Experiment.parse({}), Runtime.parse(asked), new=False, print_summary=False)
    serving, training = (Runtime.model_validate_json(launched[child][-1]) for child in ("coordinator", "devices"))
    assert re.fullmatch(address, serving.bind)
    assert training.connect == serving.bind


@pytest.mark.parametrize("edges", [0, 2])
def test_the_address_of_a_tracker_is_told_to_the_coordinator_alone_and_on_no_command_line(
    edges: int, tmp_path: Path, launched: dict[str, list[str]]
) -> None:
    out = "https://alice:s3cret@mlflow.example"
    runtime = Runtime(track=Track(to=("mlflow",), out=out))
    run_together(tmp_path, Experiment.parse({"tree": {"edges": edges}}), runtime, new=False, print_summary=False)
    assert Runtime.model_validate_json(launched["coordinator"][-1]).track == runtime.track
    assert Runtime.model_validate_json(launched["devices"][-1]).track == Track()
    assert "s3cret" not in " ".join(launched["all can read"])


@pytest.mark.parametrize(
    ("on", "cluster", "host"),
    [
        ("ray", None, "127.0.0.1"),
        ("ray", "", "127.0.0.1"),
        ("ray", "local", "127.0.0.1"),
        ("ray", "127.0.0.1:6379", "0.0.0.0"),
        ("ray", "10.1.0.4:6379", "0.0.0.0"),
        ("ray", "auto", "0.0.0.0"),
        ("ray://127.0.0.1:10001", "", "0.0.0.0"),
    ],
)
def test_the_nodes_of_a_ray_cluster_reach_the_coordinator_unless_it_is_of_this_machine_alone(
    on: str,
    cluster: str | None,
    host: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launched: dict[str, list[str]],
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if cluster is not None:
        monkeypatch.setenv("RAY_ADDRESS", cluster)
    run_together(tmp_path, Experiment.parse({}), Runtime.parse({"on": on}), new=False, print_summary=False)
    serving = Runtime.model_validate_json(launched["coordinator"][-1])
    assert re.fullmatch(rf"tcp://{host}:\d+", serving.bind)
    assert serving.keys == str(tmp_path / "keys")


@pytest.mark.parametrize("log_level", ["info", "debug"])
def test_devices_whose_last_words_cannot_be_read_end_the_run_with_its_code(
    log_level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def launch(commands: object, terminal: dict[str, Path], *rest: object, **more: object) -> Launch:
        terminal["devices"].unlink()
        terminal["devices"].mkdir()
        return Launch(exit_code=5, devices_gave_up=True, _ended={"devices": 5})

    monkeypatch.setattr(together, "launch", launch)
    runtime = Runtime.parse({"log_level": log_level})
    assert run_together(tmp_path, Experiment.parse({}), runtime, new=False, print_summary=False) == 5
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fedemu: ")]
    assert said == [f"fedemu: an error ended the devices; a line above or {tmp_path}/logs may say which"]


def test_a_run_whose_folder_cannot_be_written_may_go_on_in_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("in the way")
    assert run_together(tmp_path, Experiment.parse({}), Runtime(), new=False, print_summary=False) == 2
    told = "cannot be written: File exists; make it writable, or go on in a copy of it"
    assert f"fedemu: {tmp_path} {told}" in capsys.readouterr().err


def test_after_a_run_in_this_process_the_signals_that_stop_it_have_their_former_handlers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a command does with several runs is undone when it is stopped after the first one."""

    async def hear_signals() -> None:
        with hearing_stop(lambda name: None):
            await asyncio.sleep(0)

    def coordinate(*given: object) -> int:
        asyncio.run(hear_signals())
        return 2

    def tidy_up(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(coordinator, "coordinate", coordinate)
    former = {sign: signal.signal(sign, tidy_up) for sign in STOP_SIGNALS}
    try:
        runtime = Runtime(transport="memory")
        assert run_together(tmp_path, Experiment.parse({}), runtime, new=False, print_summary=False) == 2
        assert [signal.getsignal(sign) for sign in STOP_SIGNALS] == [tidy_up] * 3
    finally:
        for sign, handler in former.items():
            signal.signal(sign, handler)


def test_metrics_need_the_port_after_the_coordinators_unless_there_is_one_process() -> None:
    with pytest.raises(ConfigurationError, match="65535 leaves no port after it"):
        require_metrics_ports(Runtime(metrics_port=65535))
    for runtime in (Runtime(), Runtime(metrics_port=65534), Runtime(metrics_port=65535, transport="memory")):
        require_metrics_ports(runtime)


def test_the_command_that_resumes_names_the_addresses_and_the_keys_that_were_named() -> None:
    assert at_address("run", Runtime()) == "run"
    asked = Runtime(bind="tcp://*:5577", keys="my keys")
    assert at_address("coordinator", asked) == "coordinator --bind 'tcp://*:5577' --keys 'my keys'"
    assert at_address("run", Runtime(insecure=True)) == "run --insecure"
    assert at_address("run", Runtime(on="ray", nodes=2)) == "run --on ray --nodes 2"
    assert at_address("run", Runtime(on="ray")) == "run --on ray"
    assert at_address("coordinator", Runtime(metrics_port=9100)) == "coordinator --metrics-port 9100"
    shown = Runtime(metrics_port=9100, metrics_address="0.0.0.0")
    assert at_address("run", shown) == "run --metrics-port 9100 --metrics-address 0.0.0.0"
