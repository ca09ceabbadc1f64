"""How training is computed on which hardware: a shipped rule, because a choice by timing would change the last bits.

Device updates per CPU second as multiples of a plain loop's (``torch.nn``, ``torch.optim``, contiguous memory) in the
same process on the same samples; medians on an Intel Xeon of 2.5 GHz (AVX-512), torch 2.13, one thread:

==========================================  ======  ==========  ===========  ===========
work                                        serial  stack of 8  stack of 16  stack of 32
==========================================  ======  ==========  ===========  ===========
digits, 64-64-10 perceptron, 30 devices        1.5          10           12           11
the same, 15 devices                           1.5         8.3          8.4          5.9
CIFAR-10 shapes, two 5×5 convolutions          1.3        0.52            -            -
==========================================  ======  ==========  ===========  ===========

The digits are divided over 300 devices by Dirichlet(0.1), in batches of 10, 5 epochs; planning and gathering batches
count. The convolutions train on 170 images in batches of 50.

So on a CPU dense models are stacked and convolutions are not; nor are models of sequences, whose steps take as long in
a stack of 8 as alone (a BERT of two layers of 64, a recurrent layer of 128). A program that makes samples with a
generator is of the generator's kind: perceptrons that rehearse from one take 0.34 to 0.8 of the time one by one.
Nothing was measured on CUDA: there all kinds are stacked, because one device's kernels are far too small to fill a GPU.

This module imports no torch: supervisors read the environment from it.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

Kind = Literal["dense", "convolutional", "sequence"]
DeviceType = Literal["cpu", "cuda"]


class ComputeRule(NamedTuple):
    """``stack_size`` devices at once; ``serial`` computes one at a time and has none."""

    executor: Literal["serial", "vmapped"]
    stack_size: int


RULES: Final[dict[tuple[Kind, DeviceType], ComputeRule]] = {
    ("dense", "cpu"): ComputeRule("vmapped", 16),
    ("convolutional", "cpu"): ComputeRule("serial", 1),
    ("sequence", "cpu"): ComputeRule("serial", 1),
    ("dense", "cuda"): ComputeRule("vmapped", 32),
    ("convolutional", "cuda"): ComputeRule("vmapped", 8),
    ("sequence", "cuda"): ComputeRule("vmapped", 8),
}

STACK_SIZE_WHERE_FORCED: Final = 8
"""Of a vmapped executor that an experiment asks for where the rule would not choose it."""

COMPUTE_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": "2000000000",
    "MALLOC_MMAP_THRESHOLD_": "2000000000",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
"""What a trainer process is started with.

One thread, because their number changes the last bits. glibc would give every large block back to the system and fault
its pages in again at the next step; so it keeps them. cuBLAS is deterministic only with a workspace of fixed size.
"""


def compute_rule(kind: Kind, device_type: DeviceType) -> ComputeRule:
    return RULES[kind, device_type]
