"""The executor that runs two others and compares their results. Scripted executors stand for both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Forest
from fedemu.device.compute.executors.checked import Checked, Disagreement
from fedemu.device.compute.executors.executor import Job, JobResult, Source
from fedemu.protocol.errors import TrainingError

JOB = Job(0, 1, 0, np.arange(3))
PROGRAM: Any = None
SOURCE: Any = None


@dataclass
class Says:
    """An executor that gives every job the same result."""

    result: JobResult | TrainingError
    capacity: int = 1

    def run(self, program: Any, shared: Forest, jobs: Sequence[Job], source: Source) -> list[JobResult | TrainingError]:
        return [self.result for _ in jobs]


def a_result(weight: float = 1.0, bias: float = 0.0, own: float = 0.0) -> JobResult:
    delta = {"weight": torch.tensor([weight]), "bias": torch.tensor([bias])}
    return JobResult({"delta": delta}, {"control": torch.tensor(own)}, 3, 1, {"loss": 0.5}, (1, 2))


def checked(
    reference: JobResult | TrainingError, candidate: JobResult | TrainingError, *names: str
) -> JobResult | TrainingError:
    shared = {"model": {name: torch.ones(1) for name in names}}
    (result,) = Checked(Says(reference), Says(candidate)).run(PROGRAM, shared, [JOB], SOURCE)
    return result


def test_results_that_agree_are_those_of_the_candidate() -> None:
    candidate = a_result(1.0 + 1e-5)
    assert checked(a_result(), candidate) is candidate


def test_every_job_is_compared_and_the_candidate_sets_the_capacity() -> None:
    both = Checked(Says(a_result()), Says(a_result(), capacity=8))
    assert both.capacity == 8
    assert len(both.run(PROGRAM, {}, [JOB, JOB, JOB], SOURCE)) == 3


@pytest.mark.parametrize(
    ("candidate", "message"),
    [
        (a_result(2.0), "the executors disagree on delta/weight by 1, where 0.001 would be rounding"),
        (a_result(own=0.5), "the executors disagree on own/control by 0.5, where 1e-06 would be rounding"),
        (replace(a_result(), steps=2), "the executors disagree on examples, steps or label counts"),
        (replace(a_result(), payload={}), "the executors disagree on the names of the payload's tensors"),
    ],
)
def test_a_difference_is_named(candidate: JobResult, message: str) -> None:
    result = checked(a_result(), candidate)
    assert isinstance(result, Disagreement)
    assert str(result) == message


def test_metrics_need_not_agree() -> None:
    assert isinstance(checked(a_result(), replace(a_result(), metrics={})), JobResult)


@pytest.mark.parametrize(("difference", "agree"), [(0.9e-6, True), (1.1e-6, False)])
def test_a_leaf_that_is_rounding_alone_is_compared_on_the_scale_of_the_others(difference: float, agree: bool) -> None:
    result = checked(a_result(1.0, 1e-12), a_result(1.0, 1e-12 + difference))
    assert isinstance(result, JobResult) is agree


@pytest.mark.parametrize(("difference", "agree"), [(3.7e-5, True), (3.9e-5, False)])
def test_batch_normalisation_enlarges_what_is_rounding(difference: float, agree: bool) -> None:
    pair = a_result(1.0, 1e-12), a_result(1.0, 1e-12 + difference)
    assert isinstance(checked(*pair, "norm.running_var"), JobResult) is agree
    assert isinstance(checked(*pair, "norm.weight"), TrainingError)


@pytest.mark.parametrize("candidate", [a_result(1.002), a_result(0.0), a_result(own=1e-3), a_result(bias=math.nan)])
def test_a_real_difference_is_found_with_batch_normalisation_too(candidate: JobResult) -> None:
    assert isinstance(checked(a_result(), candidate, "norm.running_var"), TrainingError)


@pytest.mark.parametrize(("steps", "agree"), [(0, True), (2, True), (3, False)])
def test_models_of_half_precision_may_end_on_neighbouring_numbers(steps: int, agree: bool) -> None:
    step = 2.0**-7  # between neighbours of bfloat16 from 1 on
    theirs, ours = (
        replace(a_result(), payload={"delta": {"weight": torch.tensor([distance], dtype=torch.bfloat16)}})
        for distance in (0.0, steps * step)
    )
    shared = {"model": {"weight": torch.ones(1, dtype=torch.bfloat16), "scale": torch.full((1,), 100.0)}}
    (result,) = Checked(Says(theirs), Says(ours)).run(PROGRAM, shared, [JOB], SOURCE)
    assert isinstance(result, JobResult) == agree


def test_values_that_are_not_finite_must_be_so_in_both() -> None:
    assert isinstance(checked(a_result(math.inf), a_result(math.inf)), JobResult)
    assert isinstance(checked(a_result(math.inf), a_result(1.0)), TrainingError)


def test_a_failure_of_both_is_the_candidates_and_a_failure_of_one_is_told() -> None:
    ours, theirs = TrainingError("ours"), TrainingError("theirs")
    assert checked(theirs, ours) is ours
    for pair in ((theirs, a_result()), (a_result(), theirs)):
        assert str(checked(*pair)) == "one executor fails where the other does not: theirs"
