"""Measures of continual learning: how good a model is on all periods, if it learns one period after the other.

``accuracy [models, periods]`` holds at ``[i, j]`` the accuracy of the model after period i on the test set of period j.
While a run goes on there are fewer models than periods: the last row is the latest model, and the periods up to its own
have been seen. NaN is an unknown value, as for a period without test data, and takes no part. If nothing is known, a
measure is NaN. Arguments are anything that numpy takes as an array; results are float64.

Where devices meet tasks in orders of their own, the columns are tasks, and ``since [periods]`` tells the period in
which some device first meets each. Then a task counts from this period on. Without it, period j counts from j on.

Sources: Lopez-Paz & Ranzato, "Gradient Episodic Memory for Continual Learning" (2017), section 2; Chaudhry et al.,
"Riemannian Walk for Incremental Learning" (2018), section 3; Good et al., "Coordinated Replay Sample Selection for
Continual Federated Learning" (2023), section 5.2; Babakniya et al., "A Data-Free Approach to Mitigate Catastrophic
Forgetting in Federated Class Incremental Learning for Vision Tasks" (MFCL, 2023), section 5.

Avalanche's ``StreamBWT`` and ``StreamForwardTransfer`` are ``backward_transfer`` and ``forward_transfer``. Avalanche's
forgetting is minus backward transfer: it compares with the model that has just learnt the period. It equals
``average_forgetting`` if that model is also the best of the earlier ones. Avalanche's stream accuracy weighs by
samples, as ``average_accuracy`` does with ``examples``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedemu.algorithms.measures.forgetting import Floats, mean_known, over_distribution


def average_accuracy(accuracy: ArrayLike, examples: ArrayLike | None = None, since: ArrayLike | None = None) -> float:
    """The latest model's mean accuracy over the periods seen so far.

    ``ACC = 1/T sum_j R_Tj`` (Lopez-Paz & Ranzato, eq. 2), ``A_k`` of Chaudhry et al. All periods count the same. With
    ``examples [periods]``, the sizes of their test sets, all samples count the same.
    """
    matrix = _matrix(accuracy)
    seen = _since(since, matrix) < len(matrix)
    latest = matrix[-1, seen]
    if examples is None:
        return float(mean_known(latest))
    return float(over_distribution(latest, np.asarray(examples, dtype=np.float64)[seen]))


def average_incremental_accuracy(seen: ArrayLike) -> float:
    """The mean over the periods of the accuracy ``A^t`` on everything seen up to then: ``1/T sum_t A^t``.

    ``seen [models]`` is the accuracy of the model after period t on the test sets of the periods up to t together; all
    samples count the same. Babakniya et al. call the mean average accuracy. It describes the whole run, and
    ``average_accuracy`` only the latest model.
    """
    return float(mean_known(np.asarray(seen, dtype=np.float64)))


def forgetting_factor(performance: ArrayLike, lower_is_better: bool = False) -> Floats:
    """How much worse the latest model is than the best of the earlier ones, per test set: ``[periods]``.

    ``max_{l<k} a_lj - a_kj`` (``f_j^k`` of Chaudhry et al.), in the unit of ``performance [models, periods]``. Good et
    al. call it the forgetting factor. Earlier models include those from before the period began. Zero or less means
    that nothing was forgotten. NaN with a single model. The columns may also be other test sets than those of periods,
    such as the union of all.
    """
    matrix = _matrix(performance)
    if lower_is_better:
        matrix = -matrix
    lost: Floats = _best(matrix[:-1]) - matrix[-1]
    return lost


def average_forgetting(accuracy: ArrayLike, since: ArrayLike | None = None) -> float:
    """The mean forgetting factor of the periods before the latest model's own. NaN after a single period.

    ``F_k = 1/(k-1) sum_{j<k} f_j^k`` of Chaudhry et al. Babakniya et al. define average forgetting as the highest
    accuracy minus that at the end, over tasks 1 to T - 1. The two differ for a task on which the last model is the
    best. Here the task counts below 0; by their definition it counts 0, because the last model may be the best too.
    """
    matrix = _matrix(accuracy)
    return float(mean_known(forgetting_factor(matrix)[_since(since, matrix) < len(matrix) - 1]))


def backward_transfer(accuracy: ArrayLike, since: ArrayLike | None = None) -> float:
    """How later learning changed the accuracy on earlier periods. It is negative if they were forgotten.

    ``BWT = 1/(T-1) sum_{j<T} (R_Tj - R_jj)`` (Lopez-Paz & Ranzato, eq. 3). NaN after a single period. With
    ``since`` R_jj is the accuracy after the period in which the task was first met.
    """
    matrix = _matrix(accuracy)
    began = _since(since, matrix)
    earlier = np.flatnonzero(began < len(matrix) - 1)
    return float(mean_known(matrix[-1, earlier] - matrix[began[earlier], earlier]))


def forward_transfer(accuracy: ArrayLike, untrained: ArrayLike) -> float:
    """How earlier learning changed the accuracy on a period before the period was learnt.

    ``FWT = 1/(T-1) sum_{j>1} (R_{j-1,j} - b_j)`` (Lopez-Paz & Ranzato, eq. 4), where ``untrained [periods]`` is ``b``,
    the accuracy of the initial model. NaN after a single period.
    """
    matrix = _matrix(accuracy)
    just_before = np.diagonal(matrix, offset=1)[: len(matrix) - 1]
    return float(mean_known(just_before - np.asarray(untrained, dtype=np.float64)[1 : len(matrix)]))


def perplexity(log_likelihoods: ArrayLike, counts: ArrayLike) -> Floats:
    """``exp(-log likelihood / count)``, element by element. NaN if the count is 0.

    ``log_likelihoods`` are sums of natural logarithms over predicted tokens; ``counts`` are the numbers of these
    tokens.
    """
    totals, tokens = np.asarray(log_likelihoods, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        values: Floats = np.exp(np.where(tokens > 0, -totals / tokens, np.nan))
    return values


def relative_change(perplexity: ArrayLike, without_replay: ArrayLike) -> Floats:
    """The relative change in perplexity (RCP) against the same run without replay: ``p / p_0 - 1``. Negative is better.

    Good et al., section 5.2, which also divides the curve of each period by the all-period perplexity without replay
    (its figure 3).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        change: Floats = np.asarray(perplexity, dtype=np.float64) / np.asarray(without_replay, dtype=np.float64) - 1.0
    return change


def relative_forgetting(perplexity: ArrayLike) -> Floats:
    """The latest perplexity relative to the best of the earlier ones, per test set: ``p_k / min_{l<k} p_l - 1``.

    This is the forgetting factor of ``perplexity [models, periods]``, where lower is better, as a share of the best.
    Good et al. do not say by what they divide. In terms of their relative change the measure is
    ``forgetting_factor(relative_change(perplexity, without_replay), lower_is_better=True)``.
    """
    matrix = _matrix(perplexity)
    return relative_change(matrix[-1], -_best(-matrix[:-1]))


def _best(matrix: Floats) -> Floats:
    """The largest value of each column without NaN values. NaN if there are no other values."""
    best = np.where(np.isnan(matrix), -np.inf, matrix).max(axis=0, initial=-np.inf)
    return np.where(np.isneginf(best), np.nan, best)


def _matrix(values: ArrayLike) -> Floats:
    """The values as a matrix. Raises ValueError if it has no rows, or is no matrix."""
    matrix = np.asarray(values, dtype=np.float64)
    if matrix.ndim != 2 or not len(matrix):
        raise ValueError(f"a matrix [models, periods] with at least one model is needed, not the shape {matrix.shape}")
    return matrix


def _since(since: ArrayLike | None, matrix: Floats) -> NDArray[np.int64]:
    """The period from which on each column counts, ``[periods]``."""
    return np.arange(matrix.shape[1]) if since is None else np.asarray(since, dtype=np.int64)
