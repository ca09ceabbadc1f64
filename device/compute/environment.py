"""The environment variables that a trainer process is started with. Supervisors and benchmarks read them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.hardware import CUBLAS_WORKSPACE, FIXED_WORKSPACE, processor

_TUNABLES: Final = "GLIBC_TUNABLES"
_LARGE_PAGES: Final = "glibc.malloc.hugetlb"


def with_large_pages(tunables: str) -> str:
    """The value ``tunables`` of GLIBC_TUNABLES, with large pages for the heap unless it says something about them."""
    return tunables if _LARGE_PAGES in tunables else f"{tunables}:{_LARGE_PAGES}=1".lstrip(":")


COMPUTE_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "2000000000",
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    _TUNABLES: with_large_pages(os.environ.get(_TUNABLES, "")),
    CUBLAS_WORKSPACE: FIXED_WORKSPACE,
}
"""A trainer uses one thread, in torch and in numpy, because the number of threads changes the last bits of a result.

By default glibc gives every large block back to the system, and the next step has to fault its pages in again. The two
``MALLOC`` thresholds, in bytes, make it keep the blocks. The heap lies in large pages, where Linux allows them: the
processor finds its way to large tensors faster, and so large a process is forked in half of the time. Threads share one
heap, see ``kernel.keep_one_heap``. cuBLAS is deterministic only with a workspace of fixed size.
"""

PORTABLE_ENVIRONMENT: Final = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Haswell",
    "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V4",
}
"""What makes libraries compute alike on all x86-64 processors with AVX2: the same instructions, one thread.

Libraries read these variables when they are loaded. numpy ignores the features that a processor or a version lacks.
"""


def lacking(environment: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """The variables of ``wanted`` that ``environment`` does not have with these values."""
    return {name: value for name, value in wanted.items() if environment.get(name) != value}


def portable_environment() -> Mapping[str, str]:
    """``PORTABLE_ENVIRONMENT``, for processes of this machine. Raises ConfigurationError if its processor lacks AVX2.

    With these variables libraries take instructions of AVX2 on every processor, and a process that loads them without
    having these instructions dies.
    """
    flags = processor().get("flags")
    if flags is not None and not {"avx2", "fma"} <= set(flags.split()):
        raise ConfigurationError(
            "compute.portable = true needs an x86-64 processor with AVX2, and that of this machine has none; "
            "set compute.portable = false, or compute on another machine"
        )
    return PORTABLE_ENVIRONMENT


def hold_to_portable(device_type: str) -> str:
    """Have this process compute the same bits as on other processors. Returns the type of the device to compute on.

    Raises ConfigurationError if that cannot be had: on a GPU, on a processor without AVX2, or in a process that was
    started without the variables.
    """
    if device_type == "cuda":
        raise ConfigurationError(
            "compute.portable = true is for processors, and device_type is cuda; choose cpu, or set it to false"
        )
    wanted = portable_environment()
    import torch

    if missing := lacking(os.environ, wanted):
        name, value = next(iter(missing.items()))
        raise ConfigurationError(
            f"compute.portable = true needs {name}={value} in the environment before Python starts; "
            "`fedemu run`, `fedemu coordinator` and `fedemu device` see to it"
        )
    capability = torch.backends.cpu.get_cpu_capability()
    if capability != "AVX2":
        raise ConfigurationError(
            f"compute.portable = true needs an x86-64 processor with AVX2, and torch computes with {capability} here; "
            "set compute.portable = false"
        )
    # Its blocks fit the caches of the processor, so that the order of its sums might differ between processors.
    torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]
    return "cpu"
