"""What a coordinator asks of its machine before it begins, and how it is resumed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedemu.coordinator.settings import Settings
from fedemu.device.host import computing
from fedemu.device.host.processors import Cuda
from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.running import coordinator
from fedemu.ops.running.coordinator import coordinate_alone


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator changes this variable, which is as before after the test."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "")


@pytest.mark.parametrize(
    ("bind", "again"),
    [("tcp://localhost:0", "tcp://127.0.0.1:41873"), ("tcp://localhost:5577", "tcp://localhost:5577")],
)
def test_a_run_at_any_free_port_is_resumed_at_the_port_that_it_got(
    monkeypatch: pytest.MonkeyPatch, bind: str, again: str
) -> None:
    def coordinate(
        directory: Path, experiment: Experiment, runtime: Runtime, opened: Callable[[str], None], _: Any
    ) -> int:
        opened("tcp://127.0.0.1:41873")
        return 4

    told: list[str] = []
    monkeypatch.setattr(coordinator, "coordinate", coordinate)
    monkeypatch.setattr(coordinator, "conclude", lambda directory, code, command, **_: told.append(command))
    coordinate_alone(Path("run"), Experiment(), Runtime(bind=bind), new=True, print_summary=False)
    assert told == [f"coordinator --bind {again}"]


def test_the_command_that_brings_devices_can_be_given_to_any_shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Brackets would be a pattern."""

    def coordinate(
        directory: Path, experiment: Experiment, runtime: Runtime, opened: Callable[[str], None], _: Any
    ) -> int:
        opened("tcp://[::1]:5577")
        return 4

    monkeypatch.setattr(coordinator, "coordinate", coordinate)
    monkeypatch.setattr(coordinator, "conclude", lambda *_, **__: 4)
    coordinate_alone(Path("run"), Experiment(), Runtime(bind="tcp://[::1]:5577"), new=True, print_summary=False)
    assert "(fedemu device --n 300 --connect 'tcp://[::1]:5577')" in capsys.readouterr().err


@dataclass
class Plan:
    settings: Settings
    opened: Any = None
    quotas: Any = None
    shown: Any = None
    compute: Any = None


@pytest.mark.parametrize(
    ("device_type", "portable", "there", "found"),
    [
        ("auto", False, True, "cuda"),
        ("auto", False, False, "cpu"),
        ("cuda", False, True, "cuda"),
        ("cuda", False, False, "cpu"),
        ("cpu", False, True, "cpu"),
        ("auto", True, True, "cpu"),
    ],
)
def test_server_jobs_compute_on_the_gpu_that_a_coordinator_begins_with_and_never_on_one_if_a_run_is_portable(
    device_type: Any,
    portable: bool,
    there: bool,
    found: str,
    tmp_path: Path,
    socket_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Trainers elsewhere may have a GPU where the coordinator has none."""

    async def serve(plan: Plan) -> None:
        served.append(plan.settings.device_type)

    served: list[str] = []
    settings = Settings(run="r", seed=0, rounds=1, devices=1, per_round=1)
    experiment = Experiment.parse({"compute": {"portable": portable}})
    monkeypatch.setattr(computing, "cuda_here", lambda: Cuda(("H200",), "13.0", 1) if there else None)
    monkeypatch.setattr(coordinator, "assemble", lambda *_: Plan(settings))
    monkeypatch.setattr(coordinator, "serve", serve)
    runtime = Runtime(bind=f"ipc://{socket_folder}/c", device_type=device_type)
    asyncio.run(coordinator._serve(tmp_path, experiment, runtime, [], print))
    assert served == [found]


@pytest.mark.parametrize(("device_type", "opened"), [("auto", []), ("cpu", ["a GPU"])])
def test_own_code_that_asks_for_a_gpu_opens_none_beside_server_jobs_which_are_forked_and_could_not_use_it(
    device_type: Any, opened: list[str], tmp_path: Path, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assemble(*_: Any) -> Plan:
        torch.cuda.is_available()
        return Plan(Settings(run="r", seed=0, rounds=1, devices=1, per_round=1))

    async def serve(plan: Plan) -> None:
        return

    def open_gpu() -> int:
        found.append("a GPU")
        return 1

    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", open_gpu, raising=False)
    monkeypatch.setattr(coordinator, "assemble", assemble)
    monkeypatch.setattr(coordinator, "serve", serve)
    runtime = Runtime(bind=f"ipc://{socket_folder}/c", device_type=device_type)
    asyncio.run(coordinator._serve(tmp_path, Experiment(), runtime, [], print))
    assert found == opened


@pytest.mark.parametrize(
    ("error", "why"),
    [(MemoryError(), "no memory is left; free some"), (StopIteration(), "StopIteration"), (ValueError("no"), "no")],
)
def test_why_a_report_could_not_be_written_is_told_also_of_an_error_without_a_text(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, why: str
) -> None:
    def write(directory: Path) -> None:
        raise error

    monkeypatch.setattr("fedemu.ops.report.report.write_report", write)
    assert coordinator._report(Path("run")) == 0
    assert (
        capsys.readouterr().err == f"fedemu: the report could not be written ({why}); `fedemu report run` tries again\n"
    )
