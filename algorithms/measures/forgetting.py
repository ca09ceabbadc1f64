"""What the papers measure: forgetting of classes, rounds and devices, and how far local models drift apart.

Arrays may be numpy arrays or tensors; results are float64. The accuracy of a class without test samples is NaN, and
such a class takes no part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]


def forgetting(class_accuracy: ArrayLike) -> float:
    """The forgetting measure F of a run, from ``class_accuracy [rounds, classes]``. NaN for fewer than two rounds.

    Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", eq. 5: for each
    class the best accuracy of the rounds before the last, minus that of the last; then the mean over classes. It is
    negative if the last round is the best. (Flashback's eq. 2 writes "argmax", but means max.)
    """
    accuracy = _array(class_accuracy)
    if len(accuracy) < 2:
        return math.nan
    accuracy = accuracy[:, ~np.isnan(accuracy).any(axis=0)]
    if accuracy.shape[1] == 0:
        return math.nan
    return float(np.mean(accuracy[:-1].max(axis=0) - accuracy[-1]))


def round_forgetting(class_accuracy: ArrayLike) -> Floats:
    """Round forgetting ``[rounds - 1]``: what each round lost against the round before.

    ``class_accuracy [rounds, classes]``. Flashback, section 3: ``F_t = -1/C sum_c min(0, A_t^c - A_{t-1}^c)``. Gains of
    other classes do not compensate for losses.
    """
    accuracy = _array(class_accuracy)
    return accuracy_lost(accuracy[:-1], accuracy[1:])


def accuracy_lost(before: ArrayLike, after: ArrayLike) -> Floats:
    """The mean over classes of what ``after [..., classes]`` lost against ``before [..., classes]``: ``[...]``.

    This is the measure of ``round_forgetting`` between any two models, ``mean_c max(0, before_c - after_c)``. From the
    global model to a device's model it is local forgetting. From a device's model to the next global model it is
    aggregation forgetting. (Flashback, section 3, describes the two in words.)
    """
    return mean_known(np.maximum(0.0, _array(before) - _array(after)))


def prediction_consistency(before: ArrayLike, after: ArrayLike) -> float:
    """The cosine of the accuracies by class of two models, ``before [classes]`` and ``after [classes]``.

    It is 1 if all classes keep their accuracy relative to each other, and 0 if the models know no class in common. Lee
    et al. (FedNTD), section 2.1, compare each round's global model with that of the round before (figure 2b). Classes
    that are NaN in one of the two take no part. NaN if a model is right on no class.
    """
    old, new = _array(before), _array(after)
    known = ~(np.isnan(old) | np.isnan(new))
    old, new = old[known], new[known]
    norms = float(np.linalg.norm(old) * np.linalg.norm(new))
    return min(float(old @ new) / norms, 1.0) if norms else math.nan


def in_local(label_counts: ArrayLike) -> Floats:
    """The in-local distribution ``[..., classes]``: the proportions of devices' ``label_counts [..., classes]``.

    Lee et al. (FedNTD), definition 1, eq. 6. NaN for a device without samples.
    """
    counts = _array(label_counts)
    with np.errstate(invalid="ignore"):
        proportions: Floats = counts / counts.sum(axis=-1, keepdims=True)
    return proportions


def out_local(label_counts: ArrayLike) -> Floats:
    """The out-local distribution ``[..., classes]``: ``(1 - p_c) / (C - 1)``, which is highest for lacking classes.

    Lee et al. (FedNTD), definition 1, eq. 7. ``p`` is ``in_local``. NaN with a single class.
    """
    proportions = in_local(label_counts)
    with np.errstate(invalid="ignore"):
        rest: Floats = (1.0 - proportions) / np.float64(proportions.shape[-1] - 1)
    return rest


def over_distribution(by_class: ArrayLike, distribution: ArrayLike) -> Floats:
    """The mean ``[...]`` of ``by_class [..., classes]``, accuracies or losses, weighted by ``distribution``.

    Classes whose value is NaN are left out; the weights of the others are then scaled to add up to 1.
    """
    values, weights = np.broadcast_arrays(_array(by_class), _array(distribution))
    known = ~np.isnan(values)
    weights = np.where(known, weights, 0.0)
    with np.errstate(invalid="ignore"):
        mean: Floats = (np.where(known, values, 0.0) * weights).sum(axis=-1) / weights.sum(axis=-1)
    return mean


def local_forgetting(global_accuracy: ArrayLike, local_accuracy: ArrayLike) -> Floats:
    """Local client forgetting ``[K, K]``. At ``[j, k]`` it is what device j's training lost on device k's test data.

    Legate et al., "Re-Weighted Softmax Cross-Entropy to Control Forgetting in Federated Learning", eq. 5:
    ``Acc_k(w^{t-1}) - Acc_k(w_j^t)``. ``global_accuracy [K]`` is the global model's accuracy per device.
    ``local_accuracy [K, K]`` is at ``[j, k]`` the accuracy of device j's model on device k's data. The diagonal is what
    a device lost on its own data; it is usually below zero.
    """
    return _array(global_accuracy)[None, :] - _array(local_accuracy)


def mean_local_forgetting(local_forgetting: ArrayLike) -> Floats:
    """Average forgetting ``[K]`` of each device's model over the other devices' data (Legate et al., eq. 6).

    Devices without test data (NaN) take no part.
    """
    losses = _array(local_forgetting)
    return mean_known(np.where(np.eye(len(losses), dtype=bool), np.nan, losses))


def gradient_diversity(gradients: ArrayLike) -> float:
    """Gradient diversity of ``gradients [K, d]``: 1 if all are equal, infinite if they add up to 0.

    Lee et al. (FedNTD), definition 2, eq. 8: the mean of the squared norms, divided by the squared norm of the mean.
    """
    rows = _array(gradients)
    return diversity_of_norms(np.sum(rows**2, axis=1), float(np.sum(rows.mean(axis=0) ** 2)))


def diversity_of_norms(squared_norms: ArrayLike, squared_norm_of_mean: float) -> float:
    """``gradient_diversity``, from the ``squared_norms [K]`` of the gradients and the squared norm of their mean."""
    return float(np.mean(_array(squared_norms))) / squared_norm_of_mean if squared_norm_of_mean else math.inf


def mean_known(values: ArrayLike) -> Floats:
    """The mean over the last axis without NaN values. NaN if there are no other values."""
    numbers = _array(values)
    known = ~np.isnan(numbers)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(known, numbers, 0.0).sum(axis=-1) / known.sum(axis=-1)
    return mean


def weight_divergence(params: Mapping[str, Any], reference: Mapping[str, Any]) -> float:
    """The Euclidean distance ``||w - w_k||`` of two models (FedNTD, section 5.2). ValueError if their leaves differ."""
    if params.keys() != reference.keys():
        raise ValueError(f"the models differ in {min(params.keys() ^ reference.keys())!r}")
    return math.sqrt(sum(float(np.sum((_array(params[name]) - _array(reference[name])) ** 2)) for name in params))


def weight_alignment(activations_a: ArrayLike, activations_b: ArrayLike, labels: ArrayLike) -> float:
    """The share of a layer's neurons that prefer the same class in two models (FedNTD, section 5.1).

    ``activations_* [samples, neurons, ...]`` are the layer's outputs on the same samples; they are averaged over
    further axes. ``labels [samples]``. ``preferred_classes`` tells which class a neuron prefers.
    """
    classes = np.asarray(labels)
    means = (_means_by_class(_array(activations), classes) for activations in (activations_a, activations_b))
    return agreement(*map(preferred_classes, means))


def preferred_classes(mean_activations: ArrayLike) -> NDArray[np.int64]:
    """The class ``[neurons]`` on which the mean activation ``[classes, neurons]`` of a neuron is largest.

    It is the lowest class of equals, as for a neuron that is never active. A class without samples is NaN, and is
    preferred by no neuron.
    """
    means = _array(mean_activations)
    preferred: NDArray[np.int64] = np.where(np.isnan(means), -np.inf, means).argmax(axis=0)
    return preferred


def agreement(preferred_a: ArrayLike, preferred_b: ArrayLike) -> float:
    """The share of neurons that prefer the same class; ``preferred_* [neurons]`` are results of ``preferred_classes``.

    FedNTD, section 5.1, calls it the alignment of a layer between two models.
    """
    return float(np.mean(np.asarray(preferred_a) == np.asarray(preferred_b)))


def _means_by_class(activations: Floats, labels: NDArray[Any]) -> Floats:
    flat: Floats = activations.reshape(*activations.shape[:2], -1).mean(axis=2)
    return np.stack([flat[labels == label].mean(axis=0) for label in np.unique(labels)])


def _array(values: Any) -> Floats:
    """The values as a float64 array. A tensor is detached and copied to the CPU first."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)
