"""The rounds of a run, one after another.

``attempts.py`` plays the script of a round. ``conclusions.py`` evaluates it, and makes it durable as a row and a
checkpoint, beside the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch

from fedemu.algorithms.built_again import Original
from fedemu.algorithms.interface import Algorithm, Context, Picturing
from fedemu.algorithms.scripts import global_model, remarks_of
from fedemu.coordinator.evaluation.diagnosis import RoundDiagnosis
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.json_lines import strange
from fedemu.coordinator.record.outline import put_together, taken_apart
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.coordinator.rounds.asking import Asking
from fedemu.coordinator.rounds.attempts import Attempts, Diverged
from fedemu.coordinator.rounds.conclusions import Conclusions, Played, Standing
from fedemu.coordinator.rounds.numerics import Numerics
from fedemu.coordinator.rounds.tally import Tally
from fedemu.coordinator.service.service import Service
from fedemu.coordinator.sums.partial import RULE
from fedemu.protocol.code.own_code import account
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.wording import an_object

S = TypeVar("S")


class Rounds(Generic[S]):
    """Plays the rounds of a run, from where ``standing`` left it.

    ``numerics`` computes what rounds need, and ``beside``, another thread, what follows a round. ``computed`` tells how
    the run has been computed so far, for its checkpoints.
    """

    def __init__(
        self,
        plan: CoordinatorPlan,
        run: RunDirectory,
        service: Service,
        standing: Standing[S],
        numerics: Numerics,
        beside: Numerics,
        observers: Observers,
        computed: Callable[[], dict[str, Any]],
    ) -> None:
        self.perturbed = standing.perturbed
        self._state = standing.state
        self._conclusions: Conclusions[S] = Conclusions(plan, run, service, standing, beside, observers)
        self._plan = plan
        self._settings = plan.settings
        self._algorithm: Algorithm[S] = plan.algorithm
        self._original: Original | None = Original(plan.algorithm)
        self._watches_state = self._original.has_own
        self._service = service
        self._run = run
        self._numerics = numerics
        self._observers = observers
        self._computed = computed
        asking = Asking(plan, service, numerics, run, observers)
        self._attempts: Attempts[S] = Attempts(
            plan, asking, service, run.checkpoint, numerics, observers, self._until_nothing_computes
        )

    @property
    def standing(self) -> Standing[S]:
        """The last round that is durable."""
        return self._conclusions.standing

    async def play(self) -> None:
        """Play all rounds that are left, and make them durable. Raises QuorumError or Diverged.

        If this is cancelled or raises, the round before may still be on its way to the disk, see ``at_rest``.
        """
        for round in range(self.standing.round + 1, self._settings.rounds + 1):
            await self._play(round)
        await self._conclusions.complete()

    async def at_rest(self) -> None:
        """Wait until no round is on its way to the disk any more."""
        await self._conclusions.at_rest()

    async def _until_nothing_computes(self) -> None:
        """Wait until no thread of this process computes. None begins before the event loop goes on."""
        await self._conclusions.at_rest()
        await self._plan.at_rest()

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
        service = self._service
        tally = Tally(began=service.timeline.spent, wire=service.traffic())
        before = await self._numerics.compute(Original, self._state, True) if self._watches_state else None
        try:
            state = await self._attempts.play(self._state, context, tally)
        finally:
            self.perturbed |= tally.perturbed or service.reception.perturbed
        await self._tell_changes(round, before)
        state = await self._numerics.compute(self._settle, context, state)
        found = await self._examine(tally.diagnosis, state)
        if round == 1 or self._settings.task_of_round(round - 1) != task:
            await self._show(task, state)
        remarks = await self._numerics.compute(self._remarks, context, state)
        await self._conclusions.complete()
        tally.end(service.timeline, service.traffic())
        if found is not None:
            self._run.diagnosis(found)
        self._observers.event("checkpoint", round=round)
        record = self._record()
        initial = self._state if round == 1 else None
        self._conclusions.begin(Played(context, state, initial, tally, found, remarks, record))
        self._state = state

    def _record(self) -> dict[str, Any]:
        """What the coordinator has to remember of this moment, as values that no longer change."""
        timeline = self._service.timeline
        return {
            "time": timeline.time,
            "spent": timeline.spent,
            "perturbed": self.perturbed,
            "roster": self._service.roster.columns.to_record(),
            "leases": self._service.roster.leases.changes,
            "largest_reply": self._service.roster.admission.largest_reply,
            "cursor": self._run.cursor(),
            "frozen": self._run.frozen,
            "data": self._plan.data,
            "sums": RULE,
            "compute": self._computed(),
        }

    async def _reach(self, time: float) -> None:
        """Let the experiment's clock reach ``time``, unless it is there already.

        The virtual clock jumps there. Under the wall clock the wait is real, and devices come and go meanwhile.
        """
        timeline = self._service.timeline
        timeline.advance(time)
        await self._service.waits.until(lambda: timeline.time >= time, time - timeline.time)

    def _settle(self, context: Context, state: S) -> S:
        """The state as a checkpoint would give it back. Raises Diverged if it is not finite.

        Raises ConfigurationError if its global model is no longer one of the experiment's model.

        A resumed run starts from a checkpoint, so an undisturbed run has to compute with the same memory layout.
        """
        tensors: dict[str, torch.Tensor] = {}
        outline = taken_apart(state, tensors)
        settled = put_together(outline, tensors, state)
        for name, tensor in global_model(self._algorithm, settled, self._plan.variables).items():
            if not bool(torch.isfinite(tensor).all()):
                raise Diverged(f"{name} has values that are not finite after round {context.round}")
        return settled

    async def _tell_changes(self, round: int, before: Original | None) -> None:
        """Tell once if the method keeps something beside its state, which a resumed run would not find again.

        And once if it has changed the state ``before`` the round, from which a round that is tried again begins.
        """
        if self._original is not None:
            changed = await self._numerics.compute(self._original.changed, self._algorithm)
            if changed is not None:
                self._original = None
                self._observers.event("kept_outside", round=round, what=changed)
        if before is not None:
            changed = await self._numerics.compute(before.changed, self._state)
            if changed is not None:
                self._watches_state = False
                self._observers.event("state_changed", round=round, what=changed)

    def _remarks(self, context: Context, state: S) -> dict[str, Any]:
        """What the method says of the round. Raises ConfigurationError if this has no names, or is not for JSON."""
        said: object = remarks_of(self._algorithm, state, context)
        if not isinstance(said, Mapping):
            raise ConfigurationError(
                f"the algorithm's remarks(state) is {an_object(said)}; it must be numbers by name, "
                'as in {"distance": 0.5}'
            )
        if (found := strange(said)) is not None:
            name, value = found
            raise ConfigurationError(
                f"the algorithm's remarks(state) has {an_object(value)} as {name!r}; make it a number, a text, or a "
                "list or mapping of these"
            )
        return dict(said)

    async def _examine(self, diagnosis: RoundDiagnosis | None, state: S) -> dict[str, Any] | None:
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
