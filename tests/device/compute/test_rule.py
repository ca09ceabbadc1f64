"""The rule that chooses an executor and the size of its stack."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from fedemu.algorithms.interface import Kind
from fedemu.device.compute.rule import RULES, DeviceType, compute_rule, kind_of
from fedemu.protocol.errors import ConfigurationError


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("device_type", get_args(DeviceType))
def test_there_is_a_rule_for_every_kind_of_model_and_device(kind: Kind, device_type: DeviceType) -> None:
    executor, stack_size = compute_rule("auto", kind, device_type)
    assert (executor, stack_size) == RULES[kind, device_type]
    assert stack_size >= 2 if executor == "vmapped" else stack_size == 1


def test_an_executor_that_is_named_goes_before_the_table() -> None:
    assert compute_rule("serial", "dense", "cpu") == ("serial", 1)
    assert compute_rule("vmapped", "dense", "cpu") == ("vmapped", 16)
    assert compute_rule("checked", "dense", "cuda") == ("checked", 64)


def test_an_executor_that_is_forced_against_the_table_has_a_stack_size_of_its_own() -> None:
    assert compute_rule("vmapped", "convolutional", "cpu") == ("vmapped", 8)
    assert compute_rule("checked", "sequence", "cpu") == ("checked", 8)


def test_a_given_stack_size_replaces_that_of_the_table_and_does_not_make_a_stack() -> None:
    assert compute_rule("auto", "dense", "cpu", stack_size=2) == ("vmapped", 2)
    assert compute_rule("auto", "convolutional", "cpu", stack_size=2) == ("serial", 1)


@pytest.mark.parametrize(
    ("variables", "size"), [(4_194_304, 16), (4_194_305, 8), (8_388_608, 8), (16_777_217, 2), (10**9, 2)]
)
def test_a_stack_of_a_large_model_on_a_processor_has_fewer_places(variables: int, size: int) -> None:
    assert compute_rule("auto", "dense", "cpu", variables=variables) == ("vmapped", size)
    assert compute_rule("auto", "dense", "cpu", stack_size=16, variables=variables) == ("vmapped", 16)


@pytest.mark.parametrize(
    ("kind", "cohort", "size"),
    [
        ("convolutional", 0, 8),
        ("convolutional", 1, 2),
        ("convolutional", 5, 5),
        ("convolutional", 8, 8),
        ("convolutional", 9, 5),
        ("convolutional", 10, 5),
        ("convolutional", 13, 7),
        ("convolutional", 50, 8),
        ("dense", 30, 30),
        ("dense", 100, 50),
        ("sequence", 10, 10),
        ("sequence", 33, 17),
    ],
)
def test_stacks_on_a_gpu_are_as_even_as_the_cohort_allows(kind: Kind, cohort: int, size: int) -> None:
    assert compute_rule("auto", kind, "cuda", cohort=cohort) == ("vmapped", size)
    assert compute_rule("auto", kind, "cuda", stack_size=4, cohort=cohort) == ("vmapped", 4)
    assert compute_rule("auto", kind, "cpu", cohort=cohort) == RULES[kind, "cpu"]


def test_an_unknown_executor_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"local.executor = 'fast' is none of auto, serial, vmapped, checked"):
        compute_rule("fast", "dense", "cpu")


def test_a_program_without_a_kind_is_of_the_kind_of_the_model() -> None:
    class Convolves:
        kind = "convolutional"

    assert kind_of(object(), "dense") == "dense"
    assert kind_of(Convolves(), "dense") == "convolutional"


@pytest.mark.parametrize("module", ["rule", "environment"])
def test_the_rule_and_the_environment_are_read_without_torch(module: str) -> None:
    code = f"import sys, fedemu.device.compute.{module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
