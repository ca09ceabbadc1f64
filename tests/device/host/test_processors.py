"""How many trainers a machine has, which GPU each of them sees, and whether there is any."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedemu.device.host import processors
from fedemu.protocol.errors import ConfigurationError


@pytest.fixture(autouse=True)
def nothing_is_known_from_before() -> Iterator[None]:
    yield
    processors.cuda_here.cache_clear()
    processors.ask_for_cuda.cache_clear()


@pytest.fixture(autouse=True)
def three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 5})


@pytest.mark.parametrize(
    ("visible", "device_type", "count"),
    [("0,1", "auto", 2), ("0,1", "cuda", 2), ("0,1", "cpu", 3), ("", "auto", 3), ("-1", "auto", 3)],
)
def test_there_is_one_trainer_per_gpu_or_else_one_per_core(
    monkeypatch: pytest.MonkeyPatch, visible: str, device_type: str, count: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(processors, "cuda_here", lambda: processors.Cuda(("A",), "12.8"))
    assert processors.default_trainers(device_type) == processors.likely_trainers(device_type) == count


def test_without_a_choice_the_gpus_are_those_that_the_system_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / "nvidia0", self / "nvidia1"])
    assert processors.likely_trainers("auto") == 2


def test_there_is_one_trainer_per_core_where_torch_cannot_use_the_gpus_that_there_seem_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "NoDevFiles")
    monkeypatch.setattr(processors, "_ASK", "print('[[], null]')")
    assert processors.default_trainers("auto") == 3
    assert processors.usable_gpus("auto") == []


def test_trainers_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    shown = [processors.gpu_of(number) for number in range(3)]
    assert shown == ["GPU-a", "GPU-b", "GPU-a"]


def test_trainers_of_one_gpu_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [processors.gpu_share(trainers) for trainers in (1, 2, 3, 8)] == [1.0, 1.0, 0.5, 0.25]


def test_without_gpus_a_trainer_is_shown_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert processors.gpu_of(0) is None


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(os.path, "exists", lambda path: False)
    with pytest.raises(
        ConfigurationError, match=r"^device_type is cuda, but torch finds no CUDA device on this machine"
    ):
        processors.require_processor("cuda")
    processors.require_processor("auto")
    processors.require_processor("cpu")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ('[["B", "A", "B"], "12.8"]', processors.Cuda(("A", "B"), "12.8")),
        ("[[], null]", None),
        ("", None),
    ],
)
def test_torch_is_asked_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, answer: str, found: processors.Cuda | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(processors, "_ASK", f"print({answer!r})")
    asked = processors.ask_for_cuda()
    assert asked is not None
    assert processors.cuda_here() == found
    assert asked is processors.ask_for_cuda(), "it is asked once"
    assert asked.returncode == 0
    with nullcontext() if found else pytest.raises(ConfigurationError):
        processors.require_processor("cuda")
