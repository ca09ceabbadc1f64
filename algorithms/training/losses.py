"""The losses of the papers as pure functions of tensors, differentiable and usable under ``vmap``.

Most are means over a batch: an even mean, or one that is weighted by ``weight [B]``, where 0 marks padding. A batch of
padding has the loss 0. Losses keep the dtype of the logits or features. ``objective.py`` puts them together for local
training.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.interface import Tree

SMALLEST_NORM = 1e-8
"""In a cosine, a vector with a smaller norm counts as if it had this norm, as in torch. In float16 it is 1/128."""


def reweighted_cross_entropy(
    logits: Tensor, targets: Tensor, proportions: Tensor, weight: Tensor | None = None
) -> Tensor:
    """The mean of ``-log(β_y exp z_y / Σ_c β_c exp z_c)``: cross-entropy by the re-weighted softmax, in nats.

    ``logits [B, C]``, ``targets [B]``, and the ``proportions [C]`` of the classes in the device's data (β; a common
    factor does not matter). Classes of proportion 0 take no part. Raises ValueError if a target of positive weight is
    such a class. Under ``vmap`` values cannot be read; the loss is then infinite. Legate et al. (2023), equation 4.
    """
    _require_present(targets, proportions, weight)
    return unchecked_reweighted_cross_entropy(logits, targets, proportions, weight)


def unchecked_reweighted_cross_entropy(
    logits: Tensor, targets: Tensor, proportions: Tensor, weight: Tensor | None = None
) -> Tensor:
    """``reweighted_cross_entropy`` for steps of training, which must not read values.

    It does not check the targets. A target of proportion 0 makes the loss infinite.
    """
    present = proportions > 0
    # Selection alone puts infinities in and takes them out, so that no gradient multiplies them by 0.
    logarithms = torch.where(present, proportions, 1).to(logits.dtype).log()
    likelihoods = torch.where(present, logits + logarithms, -torch.inf).log_softmax(-1)
    return -_mean(torch.where(true_class(logits, targets), likelihoods, 0).sum(-1), weight)


def distillation(logits: Tensor, teacher_logits: Tensor, temperature: float, weight: Tensor | None = None) -> Tensor:
    """The mean of ``T² · KL(teacher ‖ student)``, with softmax at temperature T over all classes.

    ``logits`` and ``teacher_logits [B, C]``. Hinton et al. (2015); Lee et al. (2022), equations 3 and 4.
    """
    student = (logits / temperature).log_softmax(-1)
    teacher = (teacher_logits / temperature).log_softmax(-1)
    return temperature**2 * _mean((teacher.exp() * (teacher - student)).sum(-1), weight)


def not_true_distillation(
    logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    temperature: float,
    weight: Tensor | None = None,
    classes: Tensor | None = None,
) -> Tensor:
    """The mean of ``T² · KL(teacher ‖ student)``, with softmax at temperature T over all classes except the true one.

    ``logits`` and ``teacher_logits [B, C]``, ``targets [B]``. The true class's logits have no influence and so no
    gradient. With ``classes [C]`` (bool) only these take part; a row of which no class is left has the loss 0. Lee et
    al. (2022), equation 11, times the T² of its equation 3.
    """
    absent = hidden = true_class(logits, targets)
    if classes is not None:
        absent = absent | ~classes
        # Where no class is left, softmax is over all of them and counts for nothing, so that its gradient is finite.
        hidden = absent & ~absent.all(-1, keepdim=True)
    student = torch.where(hidden, -torch.inf, logits / temperature).log_softmax(-1)
    teacher = torch.where(hidden, -torch.inf, teacher_logits / temperature).log_softmax(-1)
    divergence = (teacher.exp() * torch.where(absent, 0, teacher - student)).sum(-1)
    return temperature**2 * _mean(divergence, weight)


def knowledge_weights(student_counts: Tensor, teacher_counts: Tensor) -> tuple[Tensor, Tensor]:
    """How much the student and each teacher know of each class, as shares of the sum of their label counts.

    ``student_counts [C]`` and ``teacher_counts [K, C]`` become ``alpha_student [C]`` and ``alpha_teachers [K, C]``,
    which add up to 1 for each class. If nobody counts a class, the student's share is 1. Flashback, section 4.1.
    """
    known = student_counts + teacher_counts.sum(0)
    anybody = known > 0
    divisor = torch.where(anybody, known, 1)
    return torch.where(anybody, student_counts / divisor, 1), teacher_counts / divisor


def dynamic_distillation(
    logits: Tensor,
    targets: Tensor,
    teacher_logits: Tensor,
    alpha_student: Tensor,
    alpha_teachers: Tensor,
    temperature: float,
    weight: Tensor | None = None,
) -> Tensor:
    """The mean of ``alpha_student[y] · CE + Σ_k Σ_c alpha_teachers[k, c] · p_k[c] · log(p_k[c] / q[c])``.

    ``logits [B, C]``, ``targets [B]``, ``teacher_logits [K, B, C]``, ``alpha_student [C]``, ``alpha_teachers [K, C]``.
    ``p_k`` and ``q`` are softmax at the temperature, and cross-entropy is at 1. The result is not multiplied by the
    squared temperature. A divergence that is weighted by classes can be negative. Flashback, equation 3.
    """
    chosen = true_class(logits, targets) * alpha_student
    surprise = -(chosen * logits.log_softmax(-1)).sum(-1)
    student = (logits / temperature).log_softmax(-1)
    teachers = (teacher_logits / temperature).log_softmax(-1)
    divergence = alpha_teachers[:, None] * teachers.exp() * (teachers - student)
    return _mean(surprise + divergence.sum((0, -1)), weight).to(logits.dtype)


def model_contrastive(
    features: Tensor,
    global_features: Tensor,
    previous_features: Tensor,
    temperature: float,
    weight: Tensor | None = None,
) -> Tensor:
    """The mean of ``-log(exp(s_global) / (exp(s_global) + exp(s_previous)))``.

    ``s_global`` and ``s_previous`` are cosines divided by the temperature, of the features of the model in training
    with those of the global model, and with those of the device's previous model. All features are ``[B, width]``, of
    the same samples. MOON (Li et al., 2021), equation 3.
    """
    nearer = _cosine(features, global_features) - _cosine(features, previous_features)
    return -_mean(functional.logsigmoid(nearer / temperature), weight)


def proximal(params: Tree, reference: Tree) -> Tensor:
    """Half the squared Euclidean distance of two models over the leaves of ``params``, zero-dimensional.

    This is the proximal term of FedProx (Li et al., 2020) without its coefficient.
    """
    distance = sum((leaf - reference[name]).square().sum() for name, leaf in params.items())
    return torch.as_tensor(distance) / 2


def tensor_distances(params: Tree, reference: Tree) -> Tensor:
    """Half the sum of the Euclidean distances of the leaves of ``params`` from the reference, zero-dimensional.

    No distance is squared, so a leaf's gradient has the norm 1/2 wherever the leaf is, and is 0 at the reference. This
    is FedProx's term in the code of MFCL (Babakniya et al., 2023), without its coefficient.
    """
    distance = sum(torch.linalg.vector_norm(leaf - reference[name]) for name, leaf in params.items())
    return torch.as_tensor(distance) / 2


def curvature_penalty(params: Tree, fisher_sum: Tree, weighted_sum: Tree) -> Tensor:
    """``⟨P, θ²⟩ - 2⟨Q, θ⟩`` over the leaves of ``params`` (θ), zero-dimensional.

    P (``fisher_sum``) is the sum of the other devices' Fisher diagonals. Q (``weighted_sum``) is the sum of the
    diagonals times the devices' parameters. Up to a constant the penalty is the squared distance from these parameters,
    weighted by the diagonals. FedCurv (Shoham et al., 2019).
    """
    penalty = sum(
        (fisher_sum[name] * leaf.square() - 2 * weighted_sum[name] * leaf).sum() for name, leaf in params.items()
    )
    return torch.as_tensor(penalty)


def true_class(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether each of ``logits [B, C]`` is that of its row's target (``targets [B]``): ``[B, C]`` bool.

    This is a comparison, because torch's one_hot reads values and cannot be mapped over devices.
    """
    return torch.arange(logits.shape[-1], device=logits.device) == targets[:, None]


def _mean(values: Tensor, weight: Tensor | None) -> Tensor:
    if weight is None:
        return values.mean()
    total = weight.sum()
    share = weight / torch.where(total > 0, total, 1)
    # A value of padding may be infinite, and infinity times a weight of 0 is not 0.
    return (torch.where(weight > 0, values, 0) * share.to(values.dtype)).sum()


def _cosine(left: Tensor, right: Tensor) -> Tensor:
    """The cosine over the last dimension. torch's own function writes in place, which makes a recorded step slower.

    float16 has no room for squares, so they are float32 there. The smallest norm is larger then, because a gradient
    grows with its inverse.
    """
    dtype = left.dtype
    smallest = max(SMALLEST_NORM**2, torch.finfo(dtype).tiny)
    if dtype == torch.float16:
        left, right = left.float(), right.float()
    return ((left * right).sum(-1) * _inverse_norm(left, smallest) * _inverse_norm(right, smallest)).to(dtype)


def _inverse_norm(vectors: Tensor, smallest_square: float) -> Tensor:
    return vectors.square().sum(-1).clamp(min=smallest_square).rsqrt()


def _require_present(targets: Tensor, proportions: Tensor, weight: Tensor | None) -> None:
    absent = ~(true_class(proportions, targets) & (proportions > 0)).any(-1)
    if weight is not None:
        absent = absent & (weight > 0)
    if not _readable(absent) or not absent.any():
        return
    classes = ", ".join(map(str, sorted(set(targets[absent].tolist()))))
    raise ValueError(
        f"there are targets of class {classes}, whose proportion is 0; count the classes of the data with these targets"
    )


def _readable(tensor: Tensor) -> bool:
    """Whether the tensor's values can be read: true unless ``vmap`` maps over it."""
    # torch has no public way to ask this. A test says what to do when these names are gone.
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return True
