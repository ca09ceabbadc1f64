"""A trainer's work on groups of jobs: the executor, warm-up, queries and failures."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.interface import Facts, Forest, Memory, Outcome, Tree
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.training.job_device import same_every_time
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import Objective, cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.executor import Job, JobResult
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.device.compute.rule import RULES
from fedemu.device.compute.trainer import Trainer, open_device, open_executor
from fedemu.protocol.errors import ConfigurationError, TrainingError
from fedemu.protocol.ids import Digest

MODEL = mlp((6,), 3, (4,))
LOCAL = LocalSGD(MODEL, Objective(MODEL), epochs=1, batch_size=4, lr=0.1)


class GradientSum:
    """Asks for the gradient over the whole memory, and keeps as many samples as the budget allows."""

    passes = 1.0
    declares_label_counts = True

    def payload(self, shared: Forest) -> Forest:
        return {"gradient": shared["model"]}

    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        if not len(memory.indices):
            raise ValueError("nothing to ask about")

        def loss(variables: Tree) -> Tensor:
            return cross_entropy(MODEL.apply(variables, memory.batch.x, True)[0].logits, memory.batch, facts)

        gradient = torch.func.grad(loss)(shared["model"])
        extra = shared.get("each", {}).get("extra")
        return Outcome({"gradient": gradient}, {"asked": own.get("asked", torch.zeros(())) + (extra or 1)}), None


@pytest.fixture
def corpus() -> Corpus:
    random = np.random.default_rng(0)
    split = Split(random.standard_normal((50, 6)).astype(np.float32), random.integers(0, 3, 50), {})
    return Corpus("noise", split, split, ("a", "b", "c"), (6,), np.zeros(6), np.ones(6), Digest("0" * 64))


@pytest.fixture
def trainer(corpus: Corpus) -> Trainer:
    programs: Mapping[str, Any] = {"train": LOCAL, "gradient": GradientSum()}
    examples = {"train": {"model": MODEL.init(0)}}
    return Trainer(programs, corpus, seed=1, device_type="cpu", kind="dense", examples=examples)


def job(device: int, size: int, **more: Any) -> Job:
    return Job(device, 1, 0, np.arange(device, device + size), **more)


def test_jobs_are_run_by_the_executor_of_the_rule(trainer: Trainer) -> None:
    assert trainer.capacity("train") > 1
    assert trainer.capacity("gradient") == 1
    results = trainer.run("train", {"model": MODEL.init(0)}, [job(0, 5), job(1, 9)])
    assert [(result.examples, result.steps) for result in results if isinstance(result, JobResult)] == [(5, 2), (9, 3)]


def test_only_beside_a_gpu_the_results_of_a_stack_are_encoded(trainer: Trainer) -> None:
    assert trainer.at_once("train") is None
    trainer.device = torch.device("cuda")
    assert trainer.at_once("train") == RULES["dense", "cpu"].stack_size < trainer.capacity("train")
    assert trainer.at_once("gradient") == 1


@pytest.mark.parametrize("told", ["tf32", "ieee"])
@pytest.mark.parametrize("tf32", [True, False])
def test_a_gpu_rounds_to_tf32_as_the_experiment_says_whatever_own_code_has_told_torch(
    tf32: bool, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backends: Any = torch.backends
    monkeypatch.setattr(backends, "fp32_precision", told)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with same_every_time(torch.device("cuda")):  # afterwards all switches are as before
        assert open_device("cuda", tf32).type == "cuda"
        operators = backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn
        assert [each.fp32_precision for each in operators] == ["tf32" if tf32 else "ieee"] * 3


def test_a_gpu_multiplies_with_one_workspace_also_in_a_process_that_was_started_without_the_environment_of_trainers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with same_every_time(torch.device("cuda")):
        open_device("cuda")
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "NVIDIA_TF32_OVERRIDE" not in os.environ


class Convolving(LocalSGD):
    kind = "convolutional"


def test_a_program_of_its_own_kind_is_run_by_the_executor_for_that_kind(corpus: Corpus) -> None:
    own = Convolving(**{field.name: getattr(LOCAL, field.name) for field in fields(LOCAL)})
    trainer = Trainer({"train": LOCAL, "convolve": own}, corpus, seed=1, device_type="cpu", kind="dense")
    assert trainer.capacity("train") > trainer.capacity("convolve") == 1
    shared = {"model": MODEL.init(0)}
    alone = Trainer({"train": LOCAL}, corpus, seed=1, device_type="cpu", executor="serial")
    for ours, theirs in zip(
        trainer.run("convolve", shared, [job(0, 5), job(1, 9)]),
        alone.run("train", shared, [job(0, 5), job(1, 9)]),
        strict=True,
    ):
        assert isinstance(ours, JobResult)
        assert isinstance(theirs, JobResult)
        assert all(torch.equal(leaf, theirs.payload["delta"][name]) for name, leaf in ours.payload["delta"].items())


def test_read_only_trees_train_like_others(trainer: Trainer) -> None:
    fresh = MODEL.init(0)
    arrays = {name: leaf.numpy().copy() for name, leaf in fresh.items()}
    for array in arrays.values():
        array.flags.writeable = False
    mapped = {name: torch.from_numpy(array) for name, array in arrays.items()}
    ours, theirs = (trainer.run("train", {"model": tree}, [job(0, 5)])[0] for tree in (mapped, fresh))
    assert isinstance(ours, JobResult)
    assert isinstance(theirs, JobResult)
    assert all(torch.equal(leaf, theirs.payload["delta"][name]) for name, leaf in ours.payload["delta"].items())


def test_a_warm_trainer_traces_nothing_for_its_first_jobs(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.warm_up()
    monkeypatch.setattr("fedemu.device.compute.executors.lowering.trace", None)
    results = trainer.run("train", {"model": MODEL.init(3)}, [job(device, 3 + device) for device in range(20)])
    assert all(isinstance(result, JobResult) for result in results)


def test_a_query_sees_all_samples_and_has_no_steps(trainer: Trainer, corpus: Corpus) -> None:
    shared = {"model": MODEL.init(0)}
    (result,) = trainer.run("gradient", shared, [job(2, 8)])
    assert isinstance(result, JobResult)
    assert (result.examples, result.steps, result.buffer) == (8, 0, None)
    assert result.label_counts == tuple(np.bincount(corpus.train.y[2:10], minlength=3).tolist())
    variables = {name: leaf.clone().requires_grad_() for name, leaf in shared["model"].items()}
    logits = MODEL.apply(variables, torch.from_numpy(corpus.train.x[2:10]), True)[0].logits
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(corpus.train.y[2:10])).backward()
    for name, leaf in variables.items():
        torch.testing.assert_close(result.payload["gradient"][name], leaf.grad)


def test_a_query_that_fails_fails_alone(trainer: Trainer) -> None:
    results = trainer.run("gradient", {"model": MODEL.init(0)}, [job(0, 0), job(1, 4), job(48, 4)])
    assert str(results[0]) == "device 0: the question could not be answered: ValueError: nothing to ask about"
    assert isinstance(results[1], JobResult)
    assert isinstance(results[2], TrainingError)


class _Wide(GradientSum):
    def payload(self, shared: Forest) -> Forest:
        return {"gradient": {name: leaf[None] for name, leaf in shared["model"].items()}}


class _Counts(GradientSum):
    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        return Outcome({"gradient": {"size": 3}}, {}), None  # type: ignore[dict-item]


class _Alone(GradientSum):
    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> Any:
        return super().ask(memory, shared, own, facts)[0]


class _Longer(LocalSGD):
    def payload(self, shared: Forest) -> Forest:
        return {"delta": shared["model"], "more": {"size": torch.zeros(3)}}


class _Keeping(LocalSGD):
    def finish(self, carry: Any, shared: Forest, own: Tree, facts: Facts) -> Outcome:
        return Outcome(super().finish(carry, shared, own, facts).payload, {"seen": torch.ones(2)})


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (
            _Wide(),
            "returns 'gradient/fc1.weight' from ask as torch.float32 [4, 6], but its payload tells torch.float32 ",
        ),
        (_Counts(), "returns 'gradient/size' from ask as no tensor (int), but its payload tells nothing of it; let "),
        (_Longer(MODEL, LOCAL.loss, 1, 4, 0.1), "returns 'more/size' from finish as nothing, but its payload tells "),
        (
            _Keeping(MODEL, LOCAL.loss, 1, 4, 0.1),
            "returns 'seen' from finish as torch.float32 [2], but its initial_own",
        ),
    ],
)
def test_a_program_that_returns_something_else_than_it_tells_fails_with_its_name(
    program: Any, told: str, corpus: Corpus
) -> None:
    trainer = Trainer({"second": program}, corpus, seed=3, device_type="cpu", kind="dense")
    (result,) = trainer.run("second", {"model": MODEL.init(0)}, [job(1, 4)])
    assert str(result).startswith(f"device 1: the program 'second' {told}")


def test_a_query_that_returns_one_thing_is_told_what_to_return(corpus: Corpus) -> None:
    trainer = Trainer({"second": _Alone()}, corpus, seed=3, device_type="cpu", kind="dense")
    (result,) = trainer.run("second", {"model": MODEL.init(0)}, [job(1, 4)])
    assert "ask returned an Outcome; it must return two things, an Outcome and the positions of" in str(result)


class _Exits(LocalSGD):
    def step(self, *given: Any) -> Any:
        sys.exit(3)


class _ExitsForOne(GradientSum):
    def ask(self, memory: Memory, shared: Forest, own: Tree, facts: Facts) -> tuple[Outcome, Tensor | None]:
        return sys.exit(3) if facts.device == 0 else super().ask(memory, shared, own, facts)


def test_a_program_that_exits_fails_its_devices_and_not_the_trainer(corpus: Corpus) -> None:
    programs: Mapping[str, Any] = {"train": _Exits(MODEL, LOCAL.loss, 1, 4, 0.1), "gradient": _ExitsForOne()}
    for executor in ("serial", "plain", "vmapped"):
        trainer = Trainer(programs, corpus, seed=3, device_type="cpu", kind="dense", executor=executor)
        trained = trainer.run("train", {"model": MODEL.init(0)}, [job(0, 4), job(1, 4)])
        assert [str(result) for result in trained] == [f"device {i}: the program failed: SystemExit: 3" for i in (0, 1)]
    asked, other = trainer.run("gradient", {"model": MODEL.init(0)}, [job(0, 4), job(1, 4)])
    assert str(asked) == "device 0: the question could not be answered: SystemExit: 3"
    assert isinstance(other, JobResult)


def test_an_unknown_program_fails_every_job(trainer: Trainer) -> None:
    results = trainer.run("trian", {}, [job(0, 1), job(1, 1)])
    assert [str(result) for result in results] == ["the experiment has no program 'trian'; it has gradient, train"] * 2


def test_a_forest_without_the_model_fails_every_job(trainer: Trainer) -> None:
    results = trainer.run("train", {"generator": MODEL.init(0)}, [job(0, 3), job(1, 3)])
    assert all(isinstance(result, TrainingError) for result in results)


def test_an_executor_is_opened_by_its_name_or_by_the_rule() -> None:
    assert isinstance(open_executor("auto", "dense", "cpu"), Vmapped)
    assert isinstance(open_executor("auto", "convolutional", "cpu"), Serial)
    assert isinstance(open_executor("auto", "convolutional", "cuda"), Vmapped)
    assert isinstance(open_executor("serial", "dense", "cpu"), Serial)
    assert isinstance(open_executor("vmapped", "convolutional", "cpu"), Vmapped)
    assert isinstance(open_executor("checked", "convolutional", "cpu"), Checked)


def test_wrong_names_of_executors_and_devices_are_refused(corpus: Corpus) -> None:
    with pytest.raises(ConfigurationError, match=r"local.executor = 'fast' is none of auto, serial, vmapped, checked"):
        open_executor("fast", "dense", "cpu")
    with pytest.raises(ConfigurationError, match="device_type = 'tpu' is none of auto, cpu and cuda"):
        Trainer({}, corpus, 1, device_type="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_is_refused_if_there_is_none(corpus: Corpus) -> None:
    with pytest.raises(ConfigurationError, match="torch finds no CUDA device for it; see what nvidia-smi says"):
        Trainer({}, corpus, 1, device_type="cuda")
    assert Trainer({}, corpus, 1, device_type="auto").device == torch.device("cpu")
