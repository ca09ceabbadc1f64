"""The tally of one round: it adds up what happens while the round is played, and makes the row of it."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedemu.algorithms.interface import Context
from fedemu.algorithms.measures.forgetting import accuracy_lost, prediction_consistency
from fedemu.coordinator.asks.parts import Contribution
from fedemu.coordinator.evaluation.diagnosis import RoundDiagnosis
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.timeline import Timeline
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import OUTCOMES

_EVALUATED = (
    "test_samples",
    "accuracy",
    "loss",
    "perplexity",
    "seen_accuracy",
    "seen_loss",
    "period_accuracy",
    "period_loss",
    "validation_accuracy",
    "period_since",
)
"""The columns of a row that are fields of an ``Evaluation``."""


@dataclass(frozen=True)
class Ending:
    """The end of a round: the experiment's time, the run's real time, and the bytes sent and received in the round."""

    time: float
    spent: float
    bytes_down: int
    bytes_up: int


@dataclass
class Tally:
    """The sums over all asks and attempts of one round.

    ``began`` is the run's real time at the round's start, and ``wire`` are the bytes that the coordinator had sent and
    received by then. ``metrics`` are sums over ``measured`` accepted replies. Three fields are real times in seconds:
    ``server_seconds`` is the time of server jobs, ``waited`` the time of waiting for devices, and ``device_seconds``
    the time that the accepted replies of each device took, as the device says. A device that does not say it is absent.
    ``end`` closes the tally.
    """

    began: float = 0.0
    wire: tuple[int, int] = (0, 0)
    joined: int | None = None
    """The number of devices that belonged to the fleet when the first cohort was drawn. None before that."""
    online: int | None = None
    """The number of devices that could be asked then. None before that."""
    crashed: int = 0
    attempts: int = 0
    announced: int = -1
    """The attempt that observers know of."""
    outcomes: Counter[str] = field(default_factory=Counter)
    bytes_down: int = 0
    bytes_up: int = 0
    server_seconds: float = 0.0
    waited: float = 0.0
    device_seconds: dict[DeviceId, float] = field(default_factory=dict)
    perturbed: bool = False
    metrics: dict[str, float] = field(default_factory=dict)
    measured: Counter[str] = field(default_factory=Counter)
    diagnosis: RoundDiagnosis | None = None
    """The diagnosis of the attempt under way. None if the round is not to be diagnosed."""
    ending: Ending | None = None
    """None until the round has ended."""

    def count(self, contribution: Contribution) -> None:
        """Add an accepted reply."""
        for name, value in contribution.reply.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value
            self.measured[name] += 1
        if contribution.seconds is not None:
            device = contribution.reply.device
            self.device_seconds[device] = self.device_seconds.get(device, 0.0) + contribution.seconds

    def end(self, timeline: Timeline, wire: tuple[int, int]) -> None:
        """The round ends now. ``wire`` are the bytes that the coordinator has sent and received so far."""
        down, up = wire
        self.ending = Ending(timeline.time, timeline.spent, down - self.wire[0], up - self.wire[1])

    def row(
        self,
        context: Context,
        *,
        evaluation: Evaluation | None = None,
        before: Sequence[float] | None = None,
        untrained: Sequence[float] | None = None,
        diagnosis: Mapping[str, Any] | None = None,
        remarks: Mapping[str, Any] | None = None,
    ) -> Row:
        """The row of the round, which has ended.

        ``before`` is the class accuracy of the evaluation before this one, ``untrained`` the initial model's accuracy
        by period, ``diagnosis`` the round's line of ``diagnosis.jsonl``, ``remarks`` what the algorithm says of the
        round.
        """
        lost = consistency = None
        if evaluation is not None and evaluation.class_accuracy and before is not None:
            lost = float(accuracy_lost(before, evaluation.class_accuracy))
            consistency = prediction_consistency(before, evaluation.class_accuracy)
        found = diagnosis or {}
        assert self.ending is not None, "a round that goes on has no row"
        seconds = self.ending.spent - self.began
        devices = self.device_seconds.values()
        counts: dict[str, Any] = {outcome: self.outcomes[outcome] for outcome in OUTCOMES}
        return Row(
            round=context.round,
            task=context.task,
            virtual_time=self.ending.time,
            wall_time=self.ending.spent,
            **{column: getattr(evaluation, column, None) for column in _EVALUATED},
            class_accuracy=(evaluation and evaluation.class_accuracy) or None,
            untrained_period_accuracy=None if untrained is None else tuple(untrained),
            consistency=consistency,
            round_forgetting=lost,
            local_forgetting=found.get("local_forgetting"),
            aggregation_forgetting=found.get("aggregation_forgetting"),
            local_alignment=found.get("local_alignment"),
            global_alignment=found.get("global_alignment"),
            joined=self.joined,
            online=self.online,
            selected=self.outcomes.total(),
            **counts,
            crashed=self.crashed,
            attempts=self.attempts,
            bytes_down=self.bytes_down,
            bytes_up=self.bytes_up,
            device_metrics={name: self.metrics[name] / self.measured[name] for name in sorted(self.metrics)},
            remarks=remarks or {},
            round_seconds=seconds,
            server_seconds=self.server_seconds,
            coordinator_seconds=seconds - self.waited,
            device_seconds=statistics.fmean(devices) if devices else None,
            wire_bytes_down=self.ending.bytes_down,
            wire_bytes_up=self.ending.bytes_up,
        )
