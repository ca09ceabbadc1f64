"""What a trainer process opens of an experiment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedemu.device.compute import trainer
from fedemu.device.compute.executors.executor import Job, JobResult
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import STACKS_PER_CALL
from fedemu.device.compute.rule import RULES
from fedemu.ops.assembly import parts
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.assembly.trainer import open_trainer
from fedemu.ops.experiment import Experiment


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(Path(tmp_path_factory.getbasetemp()) / "learning-cache"))


def test_a_trainer_of_the_default_experiment_is_warm_and_trains() -> None:
    opened = open_trainer(Experiment().to_bytes(), "cpu")
    opened.warm_up()
    model = Parts(Experiment()).model
    (result,) = opened.run("train", {"model": model.init(0)}, [Job(0, 1, 0, np.arange(23))])
    assert isinstance(result, JobResult)
    assert (result.examples, result.steps) == (23, 15)
    assert all(torch.isfinite(leaf).all() for leaf in result.payload["delta"].values())


def test_a_trainer_computes_by_the_executor_that_is_set() -> None:
    experiment = Experiment.parse({"local": {"executor": "serial"}})
    assert open_trainer(experiment.to_bytes(), "cpu").capacity("train") == Serial.capacity


@pytest.mark.parametrize(("stack", "size"), [(0, RULES["dense", "cpu"].stack_size), (3, 3)])
def test_stacks_have_the_size_that_is_set_or_else_that_of_the_table(stack: int, size: int) -> None:
    experiment = Experiment.parse({"local": {"stack": stack}})
    assert open_trainer(experiment.to_bytes(), "cpu").capacity("train") == STACKS_PER_CALL * size


@pytest.mark.parametrize(("over_selection", "size"), [(1.0, 30), (3.0, 45)])
def test_stacks_on_a_gpu_are_as_even_as_the_devices_of_a_round_allow(
    over_selection: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "open_device", lambda *_: torch.device("cuda"))
    experiment = Experiment.parse({"fleet": {"per_round": 30, "over_selection": over_selection}})
    assert open_trainer(experiment.to_bytes(), "cuda").at_once("train") == size


def test_a_trainer_divides_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts as quickly for a thousand devices as for one."""

    def divided(*_: object, **__: object) -> None:
        raise AssertionError("a trainer asked for the partition or the stream")

    monkeypatch.setattr(parts, "build_partition", divided)
    monkeypatch.setattr(parts, "open_stream", divided)
    open_trainer(Experiment().to_bytes(), "cpu").warm_up()
