"""What the coordinator has to know of an experiment to run it: plain numbers, no configuration objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """The rules of a run, whose rounds count from 1.

    Times are seconds; those marked *real* are of this machine's clock, the others of the experiment's.
    """

    run: str
    seed: int
    rounds: int
    devices: int
    per_round: int
    """K: how many replies a selected ask takes."""
    over_selection: float = 1.3
    deadline: float = 600.0
    quorum: float = 0.5
    """Share of K that has to be accepted for a round to count."""
    attempts: int = 3
    clock: Literal["virtual", "wall"] = "virtual"
    evaluate_every: int = 1
    diagnose_every: int = 0
    """Rounds between two diagnoses, where the plan has one; 0 is never."""
    task_of_round: Callable[[int], int] = lambda round: 0
    task_begins: Callable[[int], float] = lambda task: 0.0
    """When the task's data begin to arrive; its first round does not begin earlier."""
    heartbeat_seconds: float = 2.0
    """Real; a peer that is silent for ``heartbeat_seconds × patience`` is named dead."""
    patience: int = 5
    start_timeout: float = 60.0
    """Real: how long the fleet may take to be complete."""
    give_up: float = 60.0
    """Real: how long a device may be away without a plan before its outcome is ``failed``."""
    answer_timeout: float = 600.0
    """Real: how long the first result of an ask may take while its device is connected."""
    payload_bytes: int = 2**30
    """The largest payload that is taken."""
    max_norm: float = math.inf
    """The largest Euclidean norm of a payload that is taken."""
    replay: bool = False
    """Devices have replay buffers, which every accepted reply may have changed."""
    threads: int = 1
    """Threads of the coordinator's tensor work; their number changes the last bits."""

    @property
    def selected(self) -> int:
        """How many devices a selected ask draws: ``ceil(over_selection × K)``."""
        return ceil_share(self.over_selection, self.per_round)

    def due(self, round: int, every: int) -> bool:
        """Whether the round is one of ``every`` so many, or the last; 0 is never."""
        return every > 0 and (round % every == 0 or round == self.rounds)


def ceil_share(share: float, count: int) -> int:
    """``ceil(share × count)``, where a product that is whole but for rounding (1.1 × 30) counts as whole."""
    return math.ceil(round(share * count, 9))
