"""The settings that a coordinator needs of an experiment. They are plain numbers, no configuration objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

DeviceType = Literal["auto", "cpu", "cuda"]


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
    """K: the number of replies that an ask to a drawn cohort accepts."""
    over_selection: float = 1.3
    deadline: float = 600.0
    quorum: float = 0.5
    """The share of K that has to be accepted for a round to count."""
    attempts: int = 3
    clock: Literal["virtual", "wall"] = "virtual"
    evaluate_every: int = 1
    evaluate_all_every: int = 0
    """The number of rounds from one evaluation on all test samples to the next. With 0 all evaluations are such."""
    diagnose_every: int = 0
    """The number of rounds from one diagnosis to the next, if the plan has one. 0 means that there is none."""
    task_of_round: Callable[[int], int] = lambda round: 0
    task_begins: Callable[[int], float] = lambda task: 0.0
    """The time at which the data of a task begin to arrive. Its first round does not begin earlier."""
    heartbeat_seconds: float = 2.0
    """Real. A peer that is silent for ``heartbeat_seconds × patience`` counts as dead."""
    patience: int = 5
    planned_silence: float = 0.0
    """Real: how long a device that falls silent by plan stays away under the virtual clock if nobody asks it."""
    start_timeout: float = 60.0
    """Real: how long the fleet may take to be complete."""
    verdict_delay: float = 0.0
    """Real: how long an outcome may wait for the device's next Work, which tells it, too (virtual clock)."""
    give_up: float = 60.0
    """Real: how long a device may be away without a plan before its outcome is ``failed``."""
    answer_timeout: float = 600.0
    """Real: how long the first result of an ask may take while the device is connected (``fleet.answer_timeout``)."""
    idle_seconds: float = 60.0
    """Real: a process of a server job that uses no processor time for so long is killed."""
    stuck_seconds: float = 1800.0
    """Real: the same if it finishes no step for so long."""
    payload_bytes: int = 2**30
    """The size of the largest payload that is accepted, in bytes."""
    max_norm: float = math.inf
    """The largest Euclidean norm of a payload that is accepted."""
    replay: bool = False
    """Whether devices have replay buffers. Any accepted work may have changed the device's buffer."""
    portable: bool = False
    """Whether all processors give the same bits, and no GPU computes (``compute.portable``)."""
    mixed_compute: bool = False
    """Whether machines that compute differently may take part (``runtime.mixed_compute``)."""
    threads: int = 1
    """The number of threads for the coordinator's tensor work. It changes the last bits of results."""
    device_type: DeviceType = "cpu"
    """Where server jobs compute. ``auto`` and ``cuda`` are the GPU of the coordinator's machine if it has one."""

    @property
    def selected(self) -> int:
        """The number of devices that are drawn for a cohort: ``ceil(over_selection × K)``."""
        return ceil_share(self.over_selection, self.per_round)

    def due(self, round: int, every: int) -> bool:
        """Whether it is the turn of this round: true for every ``every``-th round and for the last. 0 means never."""
        return every > 0 and (round % every == 0 or round == self.rounds)


def ceil_share(share: float, count: int) -> int:
    """``ceil(share × count)``. A product that is not whole by a rounding error alone (1.1 × 30) counts as whole."""
    return math.ceil(round(share * count, 9))
