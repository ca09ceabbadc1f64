"""Which executor runs a program, and why: by the name that the experiment gives, or by a fixed table of measurements.

A table decides, and not a measurement at the start of a run, because the executors differ in the last bits of their
results: a choice by timing would make a run unrepeatable.

The table shows device updates per CPU second, as multiples of those of a plain loop (``torch.nn``, ``torch.optim``,
contiguous memory) in the same process on the same samples. The values are medians on an Intel Xeon of 2.5 GHz
(AVX-512) with torch 2.13 and one thread:

==========================================  ======  ==========  ===========  ===========
work                                        serial  stack of 8  stack of 16  stack of 32
==========================================  ======  ==========  ===========  ===========
digits, 64-64-10 perceptron, 30 devices        1.5          10           12           11
the same, 15 devices                           1.5         8.3          8.4          5.9
CIFAR-10 shapes, two 5×5 convolutions          1.3        0.52            -            -
==========================================  ======  ==========  ===========  ===========

The digits are divided over 300 devices by Dirichlet(0.1), in batches of 10, for 5 epochs. The time to plan and to
gather the batches counts. The convolutions train on 170 images in batches of 50.

So on a CPU dense models are stacked, and convolutions are not. Models of sequences are not stacked either: their steps
take as long in a stack of 8 as one by one (measured with a BERT of two layers of 64, and with a recurrent layer of
128). A program that makes samples with a generator is of the generator's kind: perceptrons that rehearse from a
generator run faster one by one, in 0.34 to 0.8 of the time that a stack takes. A stack takes the memory of all its
places, so one of perceptrons with more than 4 million variables has fewer.

On a GPU all kinds are stacked, because the kernels of one device are far too small to fill it. Device updates per
second on an NVIDIA H200 with torch 2.11, with captured steps in stacks:

=================================  ======  ==========  ===========  ===========  ===========  ============
work                               serial  stack of 8  stack of 16  stack of 32  stack of 64  stack of 128
=================================  ======  ==========  ===========  ===========  ===========  ============
digits, 64-64-10 perceptron           236       2,847        8,025       12,638       15,785        13,754
CIFAR-10 shapes, two convolutions     174         915          947        1,030        1,092         1,182
ResNet-18, batches of 20               36         157          180          198          210           225
BERT of two layers of 64               21         678        1,107        1,568        1,695         1,965
=================================  ======  ==========  ===========  ===========  ===========  ============

A stack of 64 perceptrons takes 4.1 ms and one of 32 takes 2.5 ms. Those of 32 convolutions take 3.6 times as long as
those of 8, and four times as much memory, so convolutions stay at 8. A stack of 64 sequences takes 1.9 times as long as
one of 32.

A stack takes nearly as long half empty as full: with 10 devices in a round, two stacks of 8 would do the work of 16. So
on a GPU the sizes of the table are limits, and stacks are as even as the number of devices allows: two of 5, which take
15 % less time than two of 8 for the convolutions, and 29 % less for ResNet-18.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple, get_args

from fedemu.algorithms.interface import Kind, OfItsOwnKind
from fedemu.protocol.errors import ConfigurationError

DeviceType = Literal["cpu", "cuda"]
ExecutorName = Literal["auto", "serial", "vmapped", "checked", "plain"]
"""The values of ``local.executor`` in an experiment. ``auto`` follows the table ``RULES``."""


class ComputeRule(NamedTuple):
    """An executor and how many devices it stacks. ``serial`` computes one device at a time: its size is 1."""

    executor: Literal["serial", "vmapped", "checked", "plain"]
    stack_size: int


RULES: Final[dict[tuple[Kind, DeviceType], ComputeRule]] = {
    ("dense", "cpu"): ComputeRule("vmapped", 16),
    ("convolutional", "cpu"): ComputeRule("serial", 1),
    ("sequence", "cpu"): ComputeRule("serial", 1),
    ("dense", "cuda"): ComputeRule("vmapped", 64),
    ("convolutional", "cuda"): ComputeRule("vmapped", 8),
    ("sequence", "cuda"): ComputeRule("vmapped", 32),
}

MOST_STACKED: Final = 2**26
"""The most variables of a stack on a processor. Training takes ten times as many numbers: 2.7 GB."""
STACK_SIZE_WHERE_FORCED: Final = 8
"""The stack size of a vmapped or checked executor, if the experiment names one where the table says ``serial``."""


def compute_rule(
    name: str, kind: Kind, device_type: DeviceType, stack_size: int = 0, cohort: int = 0, variables: int = 0
) -> ComputeRule:
    """The executor that runs programs of this kind, for the ``name`` that an experiment gives.

    ``auto`` takes the executor of the table; every other name takes the executor of that name. ``stack_size``, if it
    is not 0, replaces the table's, which on a GPU is a limit: the fewest stacks that hold ``cohort`` devices have one
    size, and no more slots than needed. A cohort of 0 is not known. On a processor a model of many ``variables`` halves
    it, down to 2. Raises ConfigurationError if no executor has this name.
    """
    if name not in get_args(ExecutorName):
        raise ConfigurationError(f"local.executor = {name!r} is none of {', '.join(get_args(ExecutorName))}")
    rule = RULES[kind, device_type]
    if name == "plain":
        return ComputeRule("plain", 1)
    if name == "serial" or (name == "auto" and rule.executor == "serial"):
        return ComputeRule("serial", 1)
    if not stack_size:
        stack_size = rule.stack_size if rule.executor == "vmapped" else STACK_SIZE_WHERE_FORCED
        if device_type == "cuda" and cohort:
            stack_size = max(2, math.ceil(cohort / math.ceil(cohort / stack_size)))
        while device_type == "cpu" and stack_size > 2 and stack_size * variables > MOST_STACKED:
            stack_size //= 2
    return ComputeRule("checked" if name == "checked" else "vmapped", stack_size)


def kind_of(program: object, model: Kind) -> Kind:
    """The kind of a program: its own if it names one, else the kind of the experiment's ``model``."""
    return program.kind if isinstance(program, OfItsOwnKind) else model
