"""What follows a round: its evaluation, its row and its checkpoint. It goes on beside the next round.

The next round needs none of it, only the state. So devices are asked while a model is evaluated and a disk is waited
for. Only a server job waits, because no process may be forked while a thread computes. Rounds are concluded one at a
time, in order. A kill loses at most the round under way and the one before it, which are then played again and come to
the same.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fedemu.algorithms.interface import Algorithm, Context
from fedemu.algorithms.models.growing import SEEN
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record import checkpoint
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.coordinator.rounds.numerics import Numerics
from fedemu.coordinator.rounds.tally import Tally
from fedemu.coordinator.service.service import Service
from fedemu.protocol.host.phases import part

S = TypeVar("S")


@dataclass
class Standing(Generic[S]):
    """How far a run has come: the last finished round, which is durable, and the values that the next round needs."""

    round: int
    state: S
    class_accuracy: tuple[float, ...] | None = None
    perturbed: bool = False


@dataclass(frozen=True)
class Played(Generic[S]):
    """A round that was played, and all that its conclusion has to know of the moment at which it ended.

    ``initial`` is the run's initial state if this is the first round. ``diagnosis`` is the round's line of
    ``diagnosis.jsonl``, if any, ``remarks`` what the algorithm says of the round, and ``record`` what the coordinator
    has to remember, with the sizes of the logs as they were.
    """

    context: Context
    state: S
    initial: S | None
    tally: Tally
    diagnosis: dict[str, Any] | None
    remarks: dict[str, Any]
    record: dict[str, Any]


class Conclusions(Generic[S]):
    """Concludes rounds. ``standing`` is the last one whose conclusion is complete.

    ``numerics`` has to be another thread than the one that the rounds compute in.
    """

    def __init__(
        self,
        plan: CoordinatorPlan,
        run: RunDirectory,
        service: Service,
        standing: Standing[S],
        numerics: Numerics,
        observers: Observers,
    ) -> None:
        self.standing = standing
        self._under_way: asyncio.Task[None] | None = None
        self._plan = plan
        self._settings = plan.settings
        self._algorithm: Algorithm[S] = plan.algorithm
        self._run = run
        self._service = service
        self._numerics = numerics
        self._observers = observers

    async def complete(self) -> None:
        """Wait until the conclusion under way is complete, and raise what it raised."""
        await self.at_rest()
        if self._under_way is not None:
            self._under_way.result()

    async def at_rest(self) -> None:
        """Wait until no conclusion is under way. If whoever waits is cancelled, the conclusion goes on to its end."""
        if self._under_way is not None:
            await asyncio.wait({self._under_way})

    def begin(self, played: Played[S]) -> None:
        """Begin to conclude a round. The conclusion before has to be complete. A failure ends the run."""
        self._under_way = asyncio.create_task(self._conclude(played))
        self._under_way.add_done_callback(self._ended)

    def _ended(self, conclusion: asyncio.Task[None]) -> None:
        error = conclusion.exception()
        if isinstance(error, Exception):
            self._service.reception.fail(error)

    async def _conclude(self, played: Played[S]) -> None:
        evaluation, untrained = await self._numerics.compute(self._evaluate, played)
        known = self.standing.class_accuracy
        row = played.tally.row(
            played.context,
            evaluation=evaluation,
            before=known,
            untrained=untrained,
            diagnosis=played.diagnosis,
            remarks=played.remarks,
        )
        self._run.metrics(row)
        class_accuracy = (evaluation and evaluation.class_accuracy) or known
        cursor = played.record["cursor"] | self._run.cursor("metrics")
        record = played.record | {"class_accuracy": class_accuracy, "cursor": cursor}

        def make_durable() -> None:
            self._run.flush()
            checkpoint.save(self._run.checkpoint, row.round, played.state, record)

        await self._numerics.compute(make_durable)
        # The checkpoint before this one is kept, and a run can go back to it.
        self._service.reception.durable_round = self.standing.round
        self.standing = Standing(row.round, played.state, class_accuracy, record["perturbed"])
        self._tell(row)

    def _evaluate(self, played: Played[S]) -> tuple[Evaluation | None, tuple[float, ...] | None]:
        """The results of the model if an evaluation is due, and after the first round what the initial model knows."""
        context, settings, evaluator = played.context, self._settings, self._plan.evaluator
        untrained = None if played.initial is None else self._untrained(played.initial)
        on_all = context.task_ends or settings.due(
            context.round, settings.evaluate_all_every or settings.evaluate_every
        )
        if not on_all and not settings.due(context.round, settings.evaluate_every):
            return None, untrained
        with part("evaluation"):
            return evaluator.evaluate(self._algorithm.variables(played.state), context.task, on_all), untrained

    def _untrained(self, initial: S) -> tuple[float, ...] | None:
        """The initial model's accuracy on each period's test set. None unless there are periods that it can know.

        A model whose classes come task by task gives no answer in classes to come, so that it is right on none of them.
        """
        variables = self._algorithm.variables(initial)
        if SEEN in variables or self._plan.evaluator.periods == 1:
            return None
        return self._plan.evaluator.evaluate(variables).period_accuracy

    def _tell(self, row: Row) -> None:
        self._observers.round_finished(row)
        self._observers.traffic("emulated", "down", row.bytes_down or 0)
        self._observers.traffic("emulated", "up", row.bytes_up or 0)
        self._observers.traffic("wire", "down", row.wire_bytes_down or 0)
        self._observers.traffic("wire", "up", row.wire_bytes_up or 0)
