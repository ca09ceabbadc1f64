"""The losses of generators with a teacher and a student, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fedemu.algorithms.incremental.data_free.losses import agreement_divergence, bounding_loss, statistics_distance


def test_the_distance_of_statistics_is_a_sum_of_norms_over_layers_with_running_ones() -> None:
    running = {"one.mean": torch.tensor([0.0, 1.0]), "one.var": torch.tensor([1.0, 1.0])}
    batch = {
        "one.mean": torch.tensor([3.0, 5.0]),
        "one.var": torch.tensor([1.0, 3.0]),
        "two.mean": torch.tensor([9.0]),
        "two.var": torch.tensor([9.0]),
    }
    assert float(statistics_distance(running, batch)) == 5.0 + 2.0
    with pytest.raises(ValueError, match="no running statistics"):
        statistics_distance({}, batch)


def test_the_divergence_counts_only_rows_to_which_both_give_the_same_answer() -> None:
    half = math.log(1 / 2)
    teacher = torch.tensor([[math.log(3 / 4), math.log(1 / 4), -50.0]] * 2)
    # To the second row the student answers 1. The third class has not come; its logits do not matter.
    student = torch.tensor([[half + 1e-6, half, -9.0], [0.0, 5.0, -9.0]])
    apart = 3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2)
    found = agreement_divergence(student, teacher, torch.tensor([True, True, False]))
    assert float(found) == pytest.approx(apart / 2, rel=1e-4)


def test_no_row_in_agreement_has_the_divergence_0_and_finite_slopes() -> None:
    student = torch.tensor([[0.0, 1.0, -50.0]], requires_grad=True)
    value = agreement_divergence(student, torch.tensor([[1.0, 0.0, -50.0]]), torch.tensor([True, True, False]))
    (slope,) = torch.autograd.grad(value, student)
    assert float(value.detach()) == 0
    assert not slope.any()


def test_the_bounding_loss_begins_at_the_radius_and_leaves_padding_out() -> None:
    features = torch.tensor([[1.0, 1.0], [0.0, 2.0], [9.0, 9.0]])
    anchors = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    weight = torch.tensor([1.0, 1.0, 0.0])
    assert float(bounding_loss(features, anchors, 0.25, weight)) == (0.5 + 2.0) / 2 - 0.25
    assert float(bounding_loss(features[:2], anchors[:2], 0.25)) == (0.5 + 2.0) / 2 - 0.25
    assert float(bounding_loss(features[:2], anchors[:2], 2.0)) == 0
    assert float(bounding_loss(features, anchors, 0.0, torch.zeros(3))) == 0
