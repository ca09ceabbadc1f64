"""Where server jobs compute: which models are worth a GPU, and what is around a job as it was before it."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from fedemu.algorithms.interface import Model
from fedemu.algorithms.models.feed_forward import cnn, lenet, mlp
from fedemu.algorithms.training.job_device import (
    device_for,
    gpu_or_processor,
    job_device,
    jobs_compute_on,
    round_to_tf32,
    rounds_to_tf32,
    same_every_time,
)
from fedemu.protocol.errors import ConfigurationError

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("there", "device_type", "found"),
    [(True, "auto", GPU), (True, "cuda", GPU), (True, "cpu", CPU), (False, "auto", CPU), (False, "cpu", CPU)],
)
def test_a_gpu_is_taken_where_there_is_one_and_it_may_be_used(
    there: bool, device_type: str, found: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    assert gpu_or_processor(device_type) == found


def test_a_job_does_not_go_on_with_other_bits_on_a_processor_if_the_gpu_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="torch finds no CUDA device any more; see what nvidia-smi says"):
        gpu_or_processor("cuda")


@pytest.mark.parametrize(
    ("model", "found"),
    [(cnn((3, 32, 32), 10), GPU), (lenet((1, 28, 28), 10), CPU), (mlp((1, 28, 28), 10, hidden=[400]), CPU)],
    ids=["2,156,490 variables and convolutions", "61,706", "318,010, and dense"],
)
def test_only_large_models_that_are_not_dense_are_trained_on_a_gpu(model: Model, found: torch.device) -> None:
    variables = model.init(0)
    assert device_for(model, variables) == CPU, "outside of a job's process nothing may ask for the GPU"
    with jobs_compute_on(lambda: GPU):
        assert device_for(model, variables) == found
        assert job_device() == GPU
    assert job_device() == CPU


def test_the_device_is_looked_for_only_when_a_job_needs_it() -> None:
    def refuse() -> torch.device:
        raise AssertionError("opening a GPU takes time")

    with jobs_compute_on(refuse):
        model = lenet((1, 28, 28), 10)
        assert device_for(model, model.init(0)) == CPU


@pytest.mark.parametrize("before", [False, True])
def test_on_a_gpu_algorithms_are_deterministic_and_not_rounded_and_afterwards_as_before(before: bool) -> None:
    def found() -> tuple[bool, ...]:
        flags, filled = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory
        ours = torch.are_deterministic_algorithms_enabled(), bool(filled)
        return *ours, flags.deterministic, flags.benchmark, flags.allow_tf32

    torch.set_deterministic_debug_mode("error" if before else "default")
    try:
        ordinary = found()
        with same_every_time(CPU):
            assert found() == ordinary
        with same_every_time(GPU):
            assert found() == (True, False, True, False, False)
        assert found() == ordinary
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(
    ("switch", "told"), [("fp32_precision", "tf32"), ("fp32_precision", "ieee"), ("allow_tf32", True)]
)
def test_jobs_on_a_gpu_compute_in_float32_whatever_own_code_has_told_torch(switch: str, told: object) -> None:
    """torch has newer and older switches for the same."""
    backends: Any = torch.backends
    products, cudnn = backends.cuda.matmul, backends.cudnn
    ordinary = rounds_to_tf32()
    try:
        setattr(products, switch, told)
        setattr(cudnn if switch == "allow_tf32" else cudnn.conv, switch, told)
        with same_every_time(GPU), same_every_time(GPU):
            assert [each.fp32_precision for each in (products, cudnn.conv, cudnn.rnn)] == ["ieee"] * 3
            assert (products.allow_tf32, cudnn.allow_tf32) == (False, False)
        assert rounds_to_tf32() == (told != "ieee", told != "ieee")
    finally:
        round_to_tf32(*ordinary)


def test_a_job_on_a_gpu_does_not_wait_for_the_import_of_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch._inductor", "torch._inductor.config"):
        monkeypatch.setitem(sys.modules, name, None)  # an import of it fails
    with same_every_time(GPU):
        assert torch.are_deterministic_algorithms_enabled()
