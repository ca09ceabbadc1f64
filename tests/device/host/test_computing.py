"""How a machine computes, as it says without torch, beside what torch itself says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from fedemu.device.host import computing
from fedemu.device.host.computing import how_it_computes, how_it_coordinates, instructions
from fedemu.device.host.processors import Cuda
from fedemu.protocol.host.hardware import processor

CHOSEN = (None, "default", "avx2")
"""Values of the variable by which somebody chooses instructions. None: it is not set."""


@pytest.fixture(scope="module")
def taken() -> list[str]:
    """The instructions that torch takes with each value of ``CHOSEN``.

    It looks at the variable when it computes for the first time. So a process that has imported it, and has computed
    nothing yet, forks one process for each.
    """
    ask = """
import os, sys, torch
for chosen in sys.argv[1:]:
    if not os.fork():
        if chosen:
            os.environ["ATEN_CPU_CAPABILITY"] = chosen
        print(torch.backends.cpu.get_cpu_capability(), flush=True)
        os._exit(0)
    os.wait()
"""
    unset = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    command = [sys.executable, "-c", ask, *(chosen or "" for chosen in CHOSEN)]
    return subprocess.run(command, env=unset, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("place", range(len(CHOSEN)), ids=map(str, CHOSEN))
def test_the_instructions_are_those_that_torch_takes(place: int, taken: list[str]) -> None:
    variables = {} if (chosen := CHOSEN[place]) is None else {"ATEN_CPU_CAPABILITY": chosen}
    assert instructions(frozenset(processor()["flags"].split()), variables) == taken[place]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("fma avx2 avx512f avx512vl avx512bw avx512dq", "AVX512"),
        ("fma avx2 avx512f avx512vl", "AVX2"),
        ("avx2", "DEFAULT"),
        ("", "DEFAULT"),
    ],
)
def test_the_flags_of_a_processor_decide(flags: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert instructions(frozenset(flags.split()), {"ATEN_CPU_CAPABILITY": "a mistake"}) == found


def test_variables_by_which_libraries_take_other_instructions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")

    def told(**variables: str) -> str:
        return instructions(frozenset(), {"ATEN_CPU_CAPABILITY": "avx2", "HOME": "/", **variables})

    assert told(MKL_CBWR="") == "AVX2"
    assert told(ONEDNN_MAX_CPU_ISA="SSE41", MKL_CBWR="AVX2") == "AVX2 MKL_CBWR=AVX2 ONEDNN_MAX_CPU_ISA=SSE41"
    many = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}
    assert told(**many) == "AVX2 (fe045db0: MKL_CBWR, ONEDNN_MAX_CPU_ISA, OPENBLAS_CORETYPE)"
    assert told(**many)[:64] != told(**{**many, "OPENBLAS_CORETYPE": "Zen"})[:64]
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert how_it_computes("cpu").instructions.endswith(" MKL_CBWR=COMPATIBLE")


def test_a_processor_without_a_vendor_has_its_implementer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tmp_path / "cpuinfo"
    told.write_text("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n\nprocessor\t: 1\nCPU part\t: 0xd4f\n")
    monkeypatch.setattr(computing, "processor", lambda: processor(told))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    found = how_it_computes("cpu")
    assert (found.processor, found.instructions) == ("0x41 0xd0c", "aarch64")


def test_a_machine_that_tells_nothing_of_its_processor_has_no_facts(tmp_path: Path) -> None:
    assert processor(tmp_path / "missing") == {}


def test_a_machine_with_gpus_names_them_unless_trainers_stay_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "cuda_here", lambda: Cuda(("NVIDIA H100 80GB HBM3",), "12.8", 1))
    monkeypatch.setattr(computing, "graphics", lambda: {"gpus": ["anything"], "driver": "550.54.15"})
    found = how_it_computes("auto")
    assert (found.device, found.gpus, found.cuda) == ("cuda", ("NVIDIA H100 80GB HBM3",), "12.8")
    assert found.driver == "550.54.15"
    assert how_it_computes("cpu") == replace(found, device="cpu", gpus=(), cuda="", driver="")
    assert how_it_coordinates("auto") == replace(found, device="cpu")
    assert how_it_coordinates("cpu") == how_it_computes("cpu")


def test_without_a_gpu_everything_that_counts_is_known() -> None:
    found = how_it_computes("cpu")
    assert found.device == "cpu"
    assert all((found.fedemu, found.torch, found.numpy, found.processor, found.instructions))
