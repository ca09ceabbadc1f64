"""How this machine computes, found without the import of torch into this process, which takes a second."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import zlib
from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from fedemu.device.host.processors import cuda_here
from fedemu.protocol.host.hardware import graphics, processor
from fedemu.protocol.messages import Compute

_CAPABILITIES: Final = {"avx512": "AVX512", "avx2": "AVX2", "default": "DEFAULT"}
"""The values of ATEN_CPU_CAPABILITY, and what torch calls them."""
_CHOOSING: Final = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "OPENBLAS_CORETYPE",
    "NPY_DISABLE_CPU_FEATURES",
)
"""The variables by which people have MKL, oneDNN, OpenBLAS and numpy take other instructions than their own choice."""
_LONGEST: Final = 64
"""The most characters of a fact."""
_AVX512: Final = {"avx512vl", "avx512bw", "avx512dq", "fma"}
_AVX2: Final = {"avx2", "fma"}


def how_it_computes(device_type: str) -> Compute:
    """What the coordinator compares of machines, if trainers compute on ``device_type`` (auto, cpu or cuda).

    Takes seconds where there is a GPU, because a process of its own asks torch for it.
    """
    cpu = processor()
    maker = cpu.get("vendor_id") or " ".join(cpu[key] for key in ("CPU implementer", "CPU part") if key in cpu)
    found = Compute(
        fedemu=_version("fedemu"),
        torch=_version("torch"),
        numpy=_version("numpy"),
        device="cpu",
        processor=_fact(maker),
        instructions=_fact(instructions(frozenset(cpu.get("flags", "").split()), os.environ)),
    )
    here = cuda_here() if device_type != "cpu" else None
    if here is None:
        return found
    return replace(
        found,
        device="cuda",
        gpus=tuple(map(_fact, here.models[:8])),
        cuda=_fact(here.version),
        driver=_fact(graphics().get("driver", "")),
    )


def how_it_coordinates(device_type: str) -> Compute:
    """What a coordinator that is resumed compares of its machine: it computes on the processor, and jobs on its GPU."""
    return replace(how_it_computes(device_type), device="cpu")


def instructions(flags: frozenset[str], environment: Mapping[str, str]) -> str:
    """What torch would answer as its CPU capability, and what the environment has the libraries below it take.

    The flags are those of the processor.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        taken = platform.machine()
    elif chosen := _CAPABILITIES.get(environment.get("ATEN_CPU_CAPABILITY", "")):
        taken = chosen
    else:
        taken = "AVX512" if flags >= _AVX512 else "AVX2" if flags >= _AVX2 else "DEFAULT"
    set_here = [f"{name}={environment[name]}" for name in _CHOOSING if environment.get(name)]
    told = " ".join([taken, *set_here])
    if len(told) <= _LONGEST:
        return told
    names = ", ".join(each.partition("=")[0] for each in set_here)
    return f"{taken} ({zlib.crc32(told.encode()):08x}: {names})"


def _version(package: str) -> str:
    try:
        return _fact(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _fact(text: str) -> str:
    """The text as far as a message takes it: 64 characters of ASCII."""
    return text.encode("ascii", "replace").decode()[:_LONGEST]
