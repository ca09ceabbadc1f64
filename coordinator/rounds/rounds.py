"""The rounds of a run, one after another: each is played, evaluated, and made durable as a row and a checkpoint.

``attempts.py`` plays the script of a round.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from fedemu.algorithms.interface import Algorithm, Context, Picturing, Remarking
from fedemu.algorithms.models.growing import SEEN
from fedemu.coordinator.evaluation.diagnosis import RoundDiagnosis
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record import checkpoint
from fedemu.coordinator.record.outline import put_together, taken_apart
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.coordinator.rounds.asking import Asking
from fedemu.coordinator.rounds.attempts import Attempts, Diverged
from fedemu.coordinator.rounds.numerics import Numerics
from fedemu.coordinator.rounds.tally import Tally
from fedemu.coordinator.service.service import Service
from fedemu.coordinator.sums.partial import RULE
from fedemu.protocol.host.own_code import account
from fedemu.protocol.host.phases import part

S = TypeVar("S")


@dataclass
class Standing(Generic[S]):
    """How far a run has come: the last finished round, which is durable, and the values that the next round needs."""

    round: int
    state: S
    class_accuracy: tuple[float, ...] | None = None
    perturbed: bool = False


class Rounds(Generic[S]):
    """Plays the rounds of a run. ``standing`` is where the last durable round left it."""

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
        self.perturbed = standing.perturbed
        self._committing: asyncio.Future[None] | None = None
        self._plan = plan
        self._settings = plan.settings
        self._algorithm: Algorithm[S] = plan.algorithm
        self._service = service
        self._run = run
        self._numerics = numerics
        self._observers = observers
        asking = Asking(plan.settings, service, plan.algorithm, plan.classes, numerics, run, observers, plan.holdings)
        self._attempts: Attempts[S] = Attempts(
            plan.settings, plan.algorithm, asking, service, plan.diagnosis, run.checkpoint, numerics, observers
        )

    async def play(self) -> None:
        """Play all rounds that are left. Raises QuorumError or Diverged."""
        for round in range(self.standing.round + 1, self._settings.rounds + 1):
            await self._play(round)

    async def committed(self) -> None:
        """Wait until a round that is being made durable is durable."""
        if self._committing is not None:
            await asyncio.wait({self._committing})

    async def _play(self, round: int) -> None:
        task = self._settings.task_of_round(round)
        await self._reach(self._settings.task_begins(task))
        context = Context(
            round=round,
            task=task,
            seed=self._settings.seed,
            classes=self._plan.classes,
            public=self._plan.public,
            task_ends=self._settings.task_of_round(round + 1) != task,
        )
        tally = Tally(began=self._service.timeline.spent, wire=self._service.traffic())
        try:
            state = await self._attempts.play(self.standing.state, context, tally)
        finally:
            self.perturbed |= tally.perturbed or self._service.reception.perturbed
        state, evaluation = await self._numerics.compute(self._settle, context, state)
        untrained = await self._numerics.compute(self._untrained) if round == 1 else None
        found = await self._conclude(tally.diagnosis, state)
        if round == 1 or self._settings.task_of_round(round - 1) != task:
            await self._show(task, state)
        row = tally.row(
            context,
            self._service.timeline,
            self._service.traffic(),
            evaluation=evaluation,
            before=self.standing.class_accuracy,
            untrained=untrained,
            diagnosis=found,
            remarks=self._algorithm.remarks(state) if isinstance(self._algorithm, Remarking) else None,
        )
        self._committing = asyncio.ensure_future(self._commit(state, evaluation, row, found))
        await asyncio.shield(self._committing)

    async def _reach(self, time: float) -> None:
        """Let the experiment's clock reach ``time``, unless it is there already.

        The virtual clock jumps there. Under the wall clock the wait is real, and devices come and go meanwhile.
        """
        timeline = self._service.timeline
        timeline.advance(time)
        await self._service.until(lambda: timeline.time >= time, time - timeline.time)

    def _settle(self, context: Context, state: S) -> tuple[S, Evaluation | None]:
        """The state as a checkpoint would give it back, and its evaluation if one is due.

        A resumed run starts from a checkpoint, so an undisturbed run has to compute with the same memory layout.
        """
        tensors: dict[str, torch.Tensor] = {}
        outline = taken_apart(state, tensors)
        settled = put_together(outline, tensors, state)
        variables = self._algorithm.variables(settled)
        for name, tensor in variables.items():
            if not bool(torch.isfinite(tensor).all()):
                raise Diverged(f"{name} has values that are not finite after round {context.round}")
        settings = self._settings
        on_all = context.task_ends or settings.due(
            context.round, settings.evaluate_all_every or settings.evaluate_every
        )
        if not on_all and not settings.due(context.round, settings.evaluate_every):
            return settled, None
        with part("evaluation"):
            return settled, self._plan.evaluator.evaluate(variables, context.task, on_all)

    def _untrained(self) -> tuple[float, ...] | None:
        """The initial model's accuracy on each period's test set. None unless there are periods that it can know.

        A model whose classes come task by task gives no answer in classes to come, so that it is right on none of them.
        """
        variables = self._algorithm.variables(self.standing.state)
        if SEEN in variables or self._settings.task_of_round(self._settings.rounds) == 0:
            return None
        return self._plan.evaluator.evaluate(variables).period_accuracy

    async def _conclude(self, diagnosis: RoundDiagnosis | None, state: S) -> dict[str, Any] | None:
        """What the diagnosis of the round found, None if the round was not diagnosed."""
        if diagnosis is None:
            return None
        return await self._numerics.compute(diagnosis.conclude, self._algorithm.variables(state))

    async def _show(self, task: int, state: S) -> None:
        """Keep pictures of what the method generates in a task. A run goes on without them, and an event says so."""
        method, album = self._algorithm, self._plan.album
        if album is None or not isinstance(method, Picturing):
            return

        def keep() -> None:
            if page := album.page(method, state, self._settings.seed):
                self._run.generated(task, page)

        try:
            await self._numerics.compute(keep)
        except Exception as error:
            self._observers.event("pictures_failed", task=task, detail=account(error).splitlines()[0])

    async def _commit(self, state: S, evaluation: Evaluation | None, row: Row, found: dict[str, Any] | None) -> None:
        """Make the round durable. Once begun, this is carried to its end, also if the run is stopped meanwhile."""
        standing = self.standing
        class_accuracy = (evaluation and evaluation.class_accuracy) or standing.class_accuracy
        self._run.metrics(row)
        if found is not None:
            self._run.diagnosis(found)
        self._observers.event("checkpoint", round=row.round)
        timeline = self._service.timeline
        record = {
            "time": timeline.time,
            "spent": timeline.spent,
            "perturbed": self.perturbed,
            "class_accuracy": class_accuracy,
            "roster": self._service.roster.columns.to_record(),
            "cursor": self._run.cursor(),
            "frozen": self._run.frozen,
            "sums": RULE,
        }

        def make_durable() -> None:
            self._run.flush()
            checkpoint.save(self._run.checkpoint, row.round, state, record)

        await self._numerics.compute(make_durable)
        self.standing = Standing(row.round, state, class_accuracy, self.perturbed)
        # The checkpoint before this one is kept, and a run can go back to it.
        self._service.reception.durable_round = standing.round
        self._observers.round_finished(row)
        self._observers.traffic("emulated", "down", row.bytes_down or 0)
        self._observers.traffic("emulated", "up", row.bytes_up or 0)
        self._observers.traffic("wire", "down", row.wire_bytes_down or 0)
        self._observers.traffic("wire", "up", row.wire_bytes_up or 0)
