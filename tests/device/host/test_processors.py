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
    monkeypatch.setattr(processors, "cuda_here", lambda: processors.Cuda(("A",), "12.8", 2))
    assert processors.default_trainers(device_type) == processors.likely_trainers(device_type) == count


def test_without_a_choice_the_gpus_are_those_that_the_system_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [self / "nvidia0", self / "nvidia1"])
    assert processors.likely_trainers("auto") == 2


def test_there_is_one_trainer_per_core_where_torch_cannot_use_the_gpus_that_there_seem_to_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(processors, "_ASK", "print('[[], null]')")
    assert processors.default_trainers("auto") == 3
    assert processors.usable_gpus("auto") == []


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        ("GPU-a, MIG-b/1", ["GPU-a", "MIG-b/1"]),
        ("0,-1,1", ["0"]),
        ("0,x,1", ["0"]),
        ("NoDevFiles", []),
        ("1,0,1", []),
    ],
)
def test_the_choice_of_gpus_is_read_as_cuda_reads_it(
    monkeypatch: pytest.MonkeyPatch, visible: str, seen: list[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert processors.gpus() == seen


def test_gpus_for_which_no_file_stands_are_those_that_torch_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: [])
    monkeypatch.setattr(processors, "cuda_here", lambda: processors.Cuda(("A",), "12.8", 2))  # as in WSL 2
    assert (processors.usable_gpus("auto"), processors.usable_gpus("cpu")) == (["0", "1"], [])


def test_trainers_of_one_gpu_share_its_memory() -> None:
    assert [processors.gpu_share(trainers, 2) for trainers in (1, 2, 3, 8)] == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    ("gpus", "machines", "parts"),
    [
        ("0", 3, [(["0"], 3)] * 3),
        ("0 1", 3, [(["0"], 2), (["0"], 2), (["1"], 1)]),
        ("a b c", 2, [(["a"], 1), (["b", "c"], 1)]),
        ("a b", 2, [(["a"], 1), (["b"], 1)]),
    ],
)
def test_machines_of_one_host_have_some_gpus_each_or_share_one(
    gpus: str, machines: int, parts: list[tuple[list[str], int]]
) -> None:
    assert processors.parts_of_gpus(gpus.split(), machines) == parts


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
        ('[["B", "A", "B"], "12.8"]', processors.Cuda(("A", "B"), "12.8", 3)),
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
