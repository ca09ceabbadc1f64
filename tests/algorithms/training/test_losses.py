"""Every loss against numbers worked out by hand, gradients against finite differences, and padding."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn import functional

from fedemu.algorithms.training.losses import (
    curvature_penalty,
    dynamic_distillation,
    knowledge_weights,
    model_contrastive,
    not_true_distillation,
    proximal,
    reweighted_cross_entropy,
    tensor_distances,
    unchecked_reweighted_cross_entropy,
)

LOG2, LOG3 = math.log(2), math.log(3)


def doubles(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def close(value: Tensor, expected: object) -> None:
    torch.testing.assert_close(value, doubles(expected), rtol=1e-12, atol=1e-12)


def test_reweighted_cross_entropy_by_hand() -> None:
    # exp z = (1, 2, 4), β = (1/2, 1/4, 1/4): β·exp z = (1/2, 1/2, 1), which add up to 2.
    # Target 0: -log(1/4) = 2 log 2; target 2: -log(1/2) = log 2; their mean is 3/2 log 2.
    logits = doubles([[0.0, LOG2, 2 * LOG2]] * 2)
    loss = reweighted_cross_entropy(logits, torch.tensor([0, 2]), doubles([0.5, 0.25, 0.25]))
    close(loss, 1.5 * LOG2)
    assert loss.dtype == torch.float64


def test_a_class_that_the_device_lacks_takes_no_part_in_its_softmax() -> None:
    # exp z = (1, 3, 1e6), and the last value counts for nothing: -log(1/(1 + 3)). No gradient reaches it.
    logits, target, proportions = doubles([[0.0, LOG3, math.log(1e6)]]), torch.tensor([0]), doubles([0.5, 0.5, 0.0])
    close(reweighted_cross_entropy(logits, target, proportions), 2 * LOG2)
    close(grad(reweighted_cross_entropy)(logits, target, proportions), [[-0.75, 0.75, 0.0]])


def test_uniform_proportions_make_it_cross_entropy() -> None:
    logits, targets = random(6, 4), torch.tensor([0, 3, 1, 2, 2, 0])
    expected = functional.cross_entropy(logits, targets)
    for proportions in (doubles([0.25] * 4), torch.tensor([7] * 4)):
        close(reweighted_cross_entropy(logits, targets, proportions), float(expected))


def test_the_loss_keeps_the_logits_dtype_whatever_the_proportions() -> None:
    logits, targets = random(2, 3).float(), torch.tensor([0, 1])
    for proportions in (doubles([0.5, 0.5, 0.0]), torch.tensor([2, 2, 0])):
        assert reweighted_cross_entropy(logits, targets, proportions, torch.ones(2)).dtype == torch.float32


def test_a_target_of_an_absent_class_is_refused() -> None:
    arguments = random(3, 4), torch.tensor([0, 3, 1]), doubles([0.5, 0.0, 0.5, 0.0])
    with pytest.raises(ValueError, match="targets of class 1, 3, whose proportion is 0"):
        reweighted_cross_entropy(*arguments)
    with pytest.raises(ValueError, match="whose proportion is 0"):
        grad(reweighted_cross_entropy)(*arguments)
    with pytest.raises(ValueError, match="targets of class 3, whose proportion is 0"):
        reweighted_cross_entropy(*arguments, torch.tensor([1.0, 1.0, 0.0]))


def test_padding_may_be_of_an_absent_class() -> None:
    logits, proportions = random(2, 3), doubles([0.5, 0.5, 0.0])
    padded = reweighted_cross_entropy(logits, torch.tensor([0, 2]), proportions, doubles([1.0, 0.0]))
    close(padded, float(reweighted_cross_entropy(logits[:1], torch.tensor([0]), proportions)))
    gradient = grad(reweighted_cross_entropy)(logits, torch.tensor([0, 2]), proportions, doubles([1.0, 0.0]))
    assert gradient.isfinite().all()
    assert not gradient[1].any()


def test_where_values_cannot_be_read_an_absent_target_is_infinite() -> None:
    logits, targets, proportions = random(2, 3, 4), torch.tensor([[0, 1, 2]] * 2), doubles([0.5, 0.5, 0.0, 0.0])
    for loss in (reweighted_cross_entropy, unchecked_reweighted_cross_entropy):
        assert vmap(loss, in_dims=(0, 0, None))(logits, targets, proportions).isinf().all()
        assert vmap(grad(loss), in_dims=(0, 0, None))(logits, targets, proportions).isfinite().all()


def test_not_true_distillation_by_hand() -> None:
    # Without the true class 1, at T = 2: student exp(z/2) = (1, 2), so (1/3, 2/3); teacher (1, 3), so (1/4, 3/4).
    # KL = 1/4 log(3/4) + 3/4 log(9/8) = 7/4 log 3 - 11/4 log 2, times T² = 4.
    student, teacher = doubles([[0.0, 5.0, 2 * LOG2]]), doubles([[0.0, -7.0, 2 * LOG3]])
    close(not_true_distillation(student, teacher, torch.tensor([1]), 2.0), 7 * LOG3 - 11 * LOG2)


def test_not_true_distillation_has_neither_value_nor_gradient_from_the_true_class() -> None:
    student, teacher, targets = random(5, 4), random(4, 5).t(), torch.tensor([0, 3, 1, 2, 2])
    moved = student + 100 * functional.one_hot(targets, 4)
    value = not_true_distillation(student, teacher, targets, 3.0)
    assert torch.equal(not_true_distillation(moved, teacher, targets, 3.0), value)
    gradient = grad(not_true_distillation)(student, teacher, targets, 3.0)
    assert torch.equal(gradient.gather(1, targets[:, None]), torch.zeros(5, 1, dtype=torch.float64))
    assert gradient.abs().sum() > 0


def test_not_true_distillation_may_be_among_some_of_the_classes() -> None:
    # Classes 0 to 2 are as above. Class 3 would have nearly all of both softmax. Of the second row no class is left.
    student, teacher = doubles([[0.0, 5.0, 2 * LOG2, 90.0]] * 2), doubles([[0.0, -7.0, 2 * LOG3, 80.0]])
    among = torch.tensor([[True, True, True, False], [False, True, False, False]])

    def loss(logits: Tensor, classes: Tensor) -> Tensor:
        return not_true_distillation(logits[None], teacher, torch.tensor([1]), 2.0, None, classes)

    close(vmap(loss)(student, among), [7 * LOG3 - 11 * LOG2, 0.0])
    gradients = vmap(grad(loss))(student, among)
    assert gradients.isfinite().all()
    assert gradients[0, 3] == 0
    assert torch.equal(gradients[1], torch.zeros(4, dtype=torch.float64))


def test_not_true_distillation_from_oneself_is_0() -> None:
    logits, targets = random(5, 4), torch.tensor([0, 3, 1, 2, 2])
    close(not_true_distillation(logits, logits, targets, 1.0), 0.0)
    close(grad(not_true_distillation)(logits, logits, targets, 1.0), [[0.0] * 4] * 5)


def test_knowledge_is_shared_by_counts() -> None:
    # A small part of the counts gives the same shares, as when gamma times few counts is all that is known.
    for part in (1.0, 0.025):
        student, teachers = knowledge_weights(part * doubles([6, 0, 1]), part * doubles([[2, 4, 0], [0, 12, 3]]))
        close(student, [6 / 8, 0, 1 / 4])
        close(teachers, [[2 / 8, 4 / 16, 0], [0, 12 / 16, 3 / 4]])


def test_the_student_knows_all_of_a_class_that_nobody_counts() -> None:
    student, teachers = knowledge_weights(torch.tensor([3, 0]), torch.tensor([[1, 0], [0, 0]]))
    assert student.tolist() == [0.75, 1.0]
    assert teachers.tolist() == [[0.25, 0.0], [0.0, 0.0]]
    gradients = grad(lambda *counts: sum(part.sum() for part in knowledge_weights(*counts)), argnums=(0, 1))(
        doubles([3, 0]), doubles([[1, 0], [0, 0]])
    )
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_dynamic_distillation_by_hand() -> None:
    # Sample: z = (0, 2 log 3), target 0: cross-entropy at T = 1 is -log(1/(1 + 9)) = log 10, weighted by 3/4.
    # At T = 2: q = (1/4, 3/4). Teacher one, z = (0, 0): p = (1/2, 1/2), alpha = (1/4, 1/2):
    #   1/4 · 1/2 · log 2 + 1/2 · 1/2 · log(2/3) = 3/8 log 2 - 1/4 log 3.
    # Teacher two, z = (2 log 3, 0): p = (3/4, 1/4), alpha = (0, 1/8): 1/8 · 1/4 · log(1/3) = -1/32 log 3.
    loss = dynamic_distillation(
        doubles([[0.0, 2 * LOG3]]),
        torch.tensor([0]),
        doubles([[[0.0, 0.0]], [[2 * LOG3, 0.0]]]),
        doubles([0.75, 0.375]),
        doubles([[0.25, 0.5], [0.0, 0.125]]),
        2.0,
    )
    close(loss, 0.75 * math.log(10) + 0.375 * LOG2 - 0.25 * LOG3 - LOG3 / 32)


def test_dynamic_distillation_by_teachers_that_know_nothing_is_cross_entropy() -> None:
    logits, targets, counts = random(6, 4), torch.tensor([0, 3, 1, 2, 2, 0]), torch.tensor([2, 1, 2, 0])
    weights = knowledge_weights(counts, torch.zeros(3, 4, dtype=torch.int64))
    loss = dynamic_distillation(logits, targets, random(3, 6, 4), *weights, 3.0)
    close(loss, float(functional.cross_entropy(logits, targets)))


def test_the_model_contrastive_loss_by_hand() -> None:
    # z = (3, 4) beside global (5, 0): cosine 3/5; beside previous (0, 2): 4/5. At T = 1/2 the two are 6/5 and 8/5:
    # -log(exp 1.2 / (exp 1.2 + exp 1.6)) = log(1 + exp 0.4).
    for length in (1.0, 1e-6):
        loss = model_contrastive(length * doubles([[3.0, 4.0]]), doubles([[5.0, 0.0]]), doubles([[0.0, 2.0]]), 0.5)
        close(loss, math.log(1 + math.exp(0.4)))


def test_models_that_agree_leave_the_contrast_constant() -> None:
    features, other = random(5, 3), random(3, 5).t()
    close(model_contrastive(features, other, other, 0.5), LOG2)
    close(grad(model_contrastive)(features, other, other, 0.5), [[0.0] * 3] * 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [0.0, 1e-6, 600.0])
def test_features_of_any_length_have_a_contrast_and_a_gradient(length: float, dtype: torch.dtype) -> None:
    features, others = torch.full((2, 3), length).to(dtype), torch.full((2, 3), 300.0).to(dtype)
    loss = model_contrastive(features, others, others, 0.5)
    assert loss.dtype == dtype
    assert float(loss) == pytest.approx(LOG2, rel=0.01)
    assert grad(model_contrastive)(features, others, -others, 0.5).isfinite().all()


def test_the_contrast_in_float16_is_that_of_float32() -> None:
    rows = [600 * random(5, 3).float(), random(3, 5).t().float() / 30, random(5, 3).float()]
    exact = model_contrastive(*rows, 0.5)
    assert float(model_contrastive(*(leaf.half() for leaf in rows), 0.5)) == pytest.approx(float(exact), rel=0.01)


def test_the_proximal_term_is_half_the_squared_distance() -> None:
    # (1 - 4)² + (2 - 2)² + (5 - 3)² = 13.
    params, reference = {"w": doubles([1.0, 2.0]), "b": doubles(5.0)}, {"w": doubles([4.0, 2.0]), "b": doubles(3.0)}
    close(proximal(params, reference), 6.5)


def test_distances_of_tensors_are_not_squared_and_pull_with_half_a_unit_each() -> None:
    # ‖(3, 4)‖ + ‖2‖ + ‖0‖ = 7.
    params = {"w": doubles([4.0, 6.0]), "b": doubles(-1.0), "c": doubles([1.0, 1.0])}
    reference = {"w": doubles([1.0, 2.0]), "b": doubles(1.0), "c": doubles([1.0, 1.0])}
    close(tensor_distances(params, reference), 3.5)
    slopes = torch.func.grad(tensor_distances)(params, reference)
    for name, slope in {"w": [0.3, 0.4], "b": -0.5, "c": [0.0, 0.0]}.items():
        close(slopes[name], slope)


def test_the_curvature_penalty_by_hand() -> None:
    # P·θ² = 2·1 + 3·4 + 1·25 = 39; Q·θ = 1·1 - 1·2 + 4·5 = 19; 39 - 2·19 = 1; buffers beside θ do not count.
    params = {"w": doubles([1.0, 2.0]), "b": doubles(5.0)}
    fisher = {"w": doubles([2.0, 3.0]), "b": doubles(1.0), "running": doubles(9.0)}
    weighted = {"w": doubles([1.0, -1.0]), "b": doubles(4.0), "running": doubles(9.0)}
    close(curvature_penalty(params, fisher, weighted), 1.0)


TARGETS = torch.tensor([0, 3, 1, 2, 2])
ALPHAS = knowledge_weights(doubles([3, 1, 2, 5]), doubles([[1, 0, 4, 2], [2, 7, 0, 1]]))
LOSSES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "reweighted": (
        lambda z, w: reweighted_cross_entropy(z, TARGETS, doubles([0.4, 0.3, 0.2, 0.1]), w),
        (random(5, 4),),
    ),
    "not-true": (lambda z, t, w: not_true_distillation(z, t, TARGETS, 2.0, w), (random(5, 4), random(4, 5).t())),
    "dynamic": (
        lambda z, t, w: dynamic_distillation(z, TARGETS, t.movedim(0, 1), *ALPHAS, 3.0, w),
        (random(5, 4), random(5, 2, 4)),
    ),
    "contrastive": (
        lambda z, g, p, w: model_contrastive(z, g, p, 0.5, w),
        (random(5, 3), random(3, 5).t(), random(5, 3) ** 2),
    ),
}
"""A loss as a function of rows and weights, and its rows ``[5, ...]``."""


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    loss, rows = LOSSES[name]
    inputs = [leaf.clone().requires_grad_() for leaf in rows]
    assert torch.autograd.gradcheck(lambda *leaves: loss(*leaves, None), inputs)


def test_gradients_of_penalties_agree_with_finite_differences() -> None:
    leaves = [random(3, 2).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(lambda w, r, _: proximal({"w": w}, {"w": 2 * r}), leaves)
    assert torch.autograd.gradcheck(lambda w, p, q: curvature_penalty({"w": w}, {"w": p}, {"w": q}), leaves)


def test_knowledge_and_penalties_mapped_over_devices_are_those_of_a_loop() -> None:
    stacks = random(3, 4).abs(), random(3, 2, 4).abs()
    for mapped, expected in zip(
        vmap(knowledge_weights)(*stacks),
        zip(*(knowledge_weights(student, teachers) for student, teachers in zip(*stacks, strict=True)), strict=True),
        strict=True,
    ):
        torch.testing.assert_close(mapped, torch.stack(expected))
    models = [{"w": leaf, "b": leaf.sum(-1)} for leaf in (random(3, 5), random(3, 6)[:, 1:], random(3, 7)[:, 2:])]
    for penalty in (lambda *trees: proximal(*trees[:2]), curvature_penalty):
        loop = [penalty(*({name: leaf[i] for name, leaf in tree.items()} for tree in models)) for i in range(3)]
        torch.testing.assert_close(vmap(penalty)(*models), torch.stack(loop))


@pytest.mark.parametrize("name", LOSSES)
def test_padding_counts_for_nothing(name: str) -> None:
    loss, rows = LOSSES[name]
    weighted = loss(*rows, doubles([1.0, 1.0, 1.0, 1.0, 0.0]))
    other = [leaf.index_fill(0, torch.tensor([4]), 17.0) for leaf in rows]
    assert torch.equal(loss(*other, doubles([1.0, 1.0, 1.0, 1.0, 0.0])), weighted)
    even = loss(*rows, None)
    close(loss(*rows, doubles([3.0] * 5)), float(even))
    last = loss(*rows, doubles([0.0, 0.0, 0.0, 0.0, 1.0]))
    close(0.8 * weighted + 0.2 * last, float(even))
    assert float(loss(*rows, doubles([0.0] * 5))) == 0.0


@pytest.mark.parametrize("name", LOSSES)
def test_mapped_over_devices_a_loss_is_that_of_a_loop(name: str) -> None:
    loss, rows = LOSSES[name]
    weight = doubles([1.0, 1.0, 1.0, 0.0, 1.0])
    stacks = [torch.stack([leaf, 2 * leaf, leaf - 1]) for leaf in rows]
    weights = weight.expand(3, 5)
    for function in (loss, grad(loss)):
        expected = [function(*(stack[i] for stack in stacks), weight) for i in range(3)]
        torch.testing.assert_close(vmap(function)(*stacks, weights), torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["is_functorch_wrapped_tensor", "is_batchedtensor", "get_unwrapped"])
def test_the_private_names_of_torch_that_tell_a_mapped_tensor_exist(name: str) -> None:
    assert hasattr(torch._C._functorch, name), (
        f"torch._C._functorch.{name} is gone; find in torch/func how vmap tells its tensors now, "
        "and use that in _readable of algorithms/training/losses.py"
    )


def test_values_are_checked_unless_vmap_maps_over_them() -> None:
    logits, targets, absent = torch.zeros(2, 1, 2), torch.ones(2, 1, dtype=torch.int64), torch.tensor([1.0, 0.0])
    with pytest.raises(ValueError, match="class 1, whose proportion is 0"):
        reweighted_cross_entropy(logits[0], targets[0], absent)
    vmap(lambda logits, targets: reweighted_cross_entropy(logits, targets, absent))(logits, targets)
