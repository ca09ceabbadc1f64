"""A recorder for tests without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from torch import Tensor

Work = Callable[[], Sequence[Tensor]]


class Rehearsal:
    """A recorder of a processor. ``error`` is raised in place of a record; ``wrong`` is added to what is replayed."""

    def __init__(self, error: Exception | None = None, wrong: float = 0.0) -> None:
        self.error, self.wrong = error, wrong
        self.records = self.replays = 0

    def record(self, work: Work) -> tuple[Sequence[Tensor], Callable[[], object]]:
        self.records += 1
        if self.error is not None:
            raise self.error
        outputs = [leaf.clone() for leaf in work()]

        def replay() -> None:
            self.replays += 1
            for kept, made in zip(outputs, work(), strict=True):
                kept.copy_(made + self.wrong)

        return outputs, replay


@pytest.fixture
def rehearse() -> type[Rehearsal]:
    return Rehearsal
