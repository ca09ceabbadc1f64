"""Losses over some of the classes, against numbers worked out by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedemu.algorithms.training.class_losses import (
    cross_entropy_among,
    distillation_among,
    feature_distillation,
    new_class_cross_entropy,
    task_temperature_cross_entropy,
)

LOG2 = math.log(2)


def doubles(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(value: Tensor, expected: object) -> None:
    torch.testing.assert_close(value, doubles(expected), rtol=1e-12, atol=1e-12)


# exp z = (1e6, 1, 3) and (1e6, 1, 1): the first class is old.
LOGITS = doubles([[6 * math.log(10), 0.0, math.log(3)], [6 * math.log(10), 0.0, 0.0]])


def test_only_the_new_classes_compete() -> None:
    # Targets 2 and 1: -log 3/4 and -log 1/2.
    close(new_class_cross_entropy(LOGITS, torch.tensor([2, 1]), 1), (2 * LOG2 - math.log(3) + LOG2) / 2)


def test_rows_of_old_classes_are_left_out_of_the_mean() -> None:
    close(new_class_cross_entropy(LOGITS, torch.tensor([0, 1]), 1), LOG2)
    close(new_class_cross_entropy(LOGITS, torch.tensor([0, 0]), 1), 0.0)


def test_without_old_classes_it_is_cross_entropy() -> None:
    targets = torch.tensor([2, 0])
    close(new_class_cross_entropy(LOGITS, targets, 0), float(torch.nn.functional.cross_entropy(LOGITS, targets)))


def test_padding_does_not_count() -> None:
    weight = torch.tensor([1.0, 0.0])
    close(new_class_cross_entropy(LOGITS, torch.tensor([2, 1]), 1, weight), 2 * LOG2 - math.log(3))
    close(new_class_cross_entropy(LOGITS, torch.tensor([2, 1]), 1, torch.zeros(2)), 0.0)


def test_old_classes_get_no_gradient_and_a_batch_without_new_ones_none_at_all() -> None:
    slope = grad(new_class_cross_entropy)(LOGITS, torch.tensor([2, 1]), 1)
    close(slope, [[0.0, 0.125, -0.125], [0.0, -0.25, 0.25]])
    close(grad(new_class_cross_entropy)(LOGITS, torch.tensor([0, 0]), 3), [[0.0] * 3] * 2)


def by_temperature(targets: list[int], old: list[bool], new: list[bool], **more: object) -> Tensor:
    # exp(z / temperature) = (2, 3, 4) for the temperatures 0.9, 1.1 and 1.1.
    logits = doubles([[0.9 * LOG2, 1.1 * math.log(3), 1.1 * math.log(4)]] * len(targets))
    return task_temperature_cross_entropy(logits, torch.tensor(targets), torch.tensor(old), torch.tensor(new), **more)


def test_the_rows_of_old_and_of_new_classes_have_a_mean_each() -> None:
    old, new = [True, False, False], [False, True, True]
    # The softmax is (2, 3, 4) / 9.
    close(by_temperature([0, 1, 2], old, new), 1.1 * math.log(9 / 2) + 0.9 * (math.log(3) + math.log(9 / 4)) / 2)
    close(by_temperature([1], old, new), 0.9 * math.log(3))
    close(by_temperature([0, 0], old, new), 1.1 * math.log(9 / 2))
    weight = torch.tensor([1.0, 0.0, 1.0])
    close(by_temperature([0, 1, 2], old, new, weight=weight), 1.1 * math.log(9 / 2) + 0.9 * math.log(9 / 4))


def test_classes_that_have_not_come_yet_take_no_part() -> None:
    # Of (2, 3, 4) only the first two have come.
    close(
        by_temperature([0, 1], [True, False, False], [False, True, False]),
        1.1 * math.log(5 / 2) + 0.9 * math.log(5 / 3),
    )
    slope = grad(
        lambda z: task_temperature_cross_entropy(
            z, torch.tensor([1]), torch.tensor([True, False, False]), torch.tensor([False, True, False])
        )
    )(doubles([[0.0, 0.0, 9.0]]))
    close(slope, [[0.9 * 0.5 / 0.9, -0.9 * 0.5 / 1.1, 0.0]])


def test_in_the_first_task_the_loss_by_temperature_is_cross_entropy() -> None:
    logits, targets = doubles([[1.0, 2.0, 3.0], [0.5, 0.0, -1.0]]), torch.tensor([2, 0])
    loss = task_temperature_cross_entropy(logits, targets, torch.zeros(3) > 0, torch.ones(3) > 0)
    close(loss, float(torch.nn.functional.cross_entropy(logits, targets)))


def test_the_loss_by_temperature_may_differ_in_its_task_from_device_to_device() -> None:
    logits, targets = doubles([[[1.0, 2.0], [0.5, 0.0]]] * 2), torch.tensor([[1, 0]] * 2)
    old, new = torch.tensor([[False, False], [True, False]]), torch.tensor([[True, True], [False, True]])
    both = vmap(task_temperature_cross_entropy)(logits, targets, old, new)
    for device in (0, 1):
        close(
            both[device],
            float(task_temperature_cross_entropy(logits[device], targets[device], old[device], new[device])),
        )


def test_classes_need_not_be_neighbours() -> None:
    # Among classes 0 and 1 of exp z = (1e6, 1, 3): -log(1/(1e6 + 1)).
    among = cross_entropy_among(LOGITS[:1], torch.tensor([1]), torch.tensor([True, True, False]))
    close(among, math.log(1e6 + 1))


def test_the_first_new_class_may_differ_between_devices() -> None:
    targets = torch.tensor([2, 1])
    stacked = vmap(lambda first: new_class_cross_entropy(LOGITS, targets, first))(torch.tensor([0, 1]))
    for value, first in zip(stacked, (0, 1), strict=True):
        close(value, float(new_class_cross_entropy(LOGITS, targets, first)))


def test_feature_distillation_by_hand() -> None:
    # Drifts (1, 0) and (0, 2) through rows (3, 1) and (0, 5): (3, 0) -> 9, and (2, 10) -> 104.
    features, previous = doubles([[1.0, 1.0], [2.0, 2.0]]), doubles([[0.0, 1.0], [2.0, 0.0]])
    head = doubles([[3.0, 1.0], [0.0, 5.0]])
    close(feature_distillation(features, previous, head), (9 + 104) / 2)
    close(feature_distillation(features, previous, head, torch.tensor([0.0, 1.0])), 104.0)
    close(feature_distillation(features, previous, head, torch.zeros(2)), 0.0)


def test_features_that_the_previous_head_does_not_read_may_drift() -> None:
    features, previous = doubles([[5.0, 1.0]]), doubles([[0.0, 1.0]])
    close(feature_distillation(features, previous, doubles([[0.0, 1.0]])), 0.0)


def test_a_teacher_is_asked_about_the_classes_it_knows() -> None:
    # At temperature 2 the teacher says (3/4, 1/4) of the first two classes, the student (1/2, 1/2).
    teacher, student = doubles([[2 * math.log(3), 0.0, 90.0]]), doubles([[4.0, 4.0, -7.0]])
    known = torch.tensor([True, True, False])
    expected = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    close(distillation_among(student, teacher, known, 2.0), expected)
    slope = grad(distillation_among)(student, teacher, known, 2.0)
    close(slope, [[-0.125, 0.125, 0.0]])
    close(distillation_among(student, teacher, known, 2.0, torch.zeros(1)), 0.0)
