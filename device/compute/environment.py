"""The environment variables that a trainer process is started with. Supervisors and benchmarks read them."""

from __future__ import annotations

from typing import Final

COMPUTE_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "2000000000",
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""A trainer uses one thread, because the number of threads changes the last bits of a result.

By default glibc gives every large block back to the system, and the next step has to fault its pages in again. The two
``MALLOC`` thresholds, in bytes, make it keep the blocks. cuBLAS is deterministic only with a workspace of fixed size.
"""
