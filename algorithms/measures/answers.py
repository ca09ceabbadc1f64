"""Which answers of a model are right."""

from __future__ import annotations

from torch import Tensor


def right_answers(logits: Tensor, labels: Tensor) -> Tensor:
    """Which of the answers ``logits [n, classes]`` give their class ``labels [n]``: booleans ``[n]``.

    Logits with a NaN, which torch takes as the largest, are no answer.
    """
    largest, answered = logits.max(1)
    return (answered == labels) & ~largest.isnan()
