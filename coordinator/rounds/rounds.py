"""Driving the algorithm's script: its requests become exchanges and server jobs, its rounds rows and checkpoints."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from fedemu.algorithms.interface import (
    Algorithm,
    Ask,
    Context,
    Picturing,
    PublicData,
    Remarking,
    Reply,
    Script,
    ServerJob,
    Tree,
)
from fedemu.coordinator.evaluation.album import Album
from fedemu.coordinator.evaluation.diagnosis import Diagnosis, RoundDiagnosis
from fedemu.coordinator.evaluation.evaluate import Evaluation
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import Evaluates
from fedemu.coordinator.record import checkpoint
from fedemu.coordinator.record.outline import put_together, taken_apart
from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.coordinator.rounds.asking import Asking, TooFewReplies
from fedemu.coordinator.rounds.server_job import run_server_job
from fedemu.coordinator.rounds.tally import Tally
from fedemu.coordinator.service.service import Service
from fedemu.coordinator.settings import Settings
from fedemu.protocol.errors import ConfigurationError, FedemuError, QuorumError
from fedemu.protocol.ids import AskId

S = TypeVar("S")
T = TypeVar("T")


class Diverged(Exception):
    """The model, or too many replies, are not finite any more."""


@dataclass
class Standing(Generic[S]):
    """Where a run stands: the last finished round, which is durable, and what the next one needs of it."""

    round: int
    state: S
    class_accuracy: tuple[float, ...] | None = None
    perturbed: bool = False


class _Ended(NamedTuple):
    """A script's last value."""

    state: Any


class Rounds(Generic[S]):
    """Plays the rounds of a run, one after another."""

    def __init__(
        self,
        settings: Settings,
        algorithm: Algorithm[S],
        asking: Asking,
        service: Service,
        evaluator: Evaluates,
        diagnosis: Diagnosis | None,
        album: Album | None,
        run: RunDirectory,
        standing: Standing[S],
        classes: int,
        public: PublicData | None,
        numerics: Executor,
        observers: Observers,
    ) -> None:
        self.standing = standing
        self.perturbed = standing.perturbed
        self._committing: asyncio.Future[None] | None = None
        self._settings = settings
        self._algorithm = algorithm
        self._asking = asking
        self._service = service
        self._evaluator = evaluator
        self._diagnosis = diagnosis
        self._album = album
        self._run = run
        self._classes = classes
        self._public = public
        self._numerics = numerics
        self._observers = observers

    async def play(self) -> None:
        """To the last round. Raises QuorumError or Diverged; ``standing`` then is where the last good round left it."""
        for round in range(self.standing.round + 1, self._settings.rounds + 1):
            task = self._settings.task_of_round(round)
            await self._reach(self._settings.task_begins(task))
            context = Context(
                round=round,
                task=task,
                seed=self._settings.seed,
                classes=self._classes,
                public=self._public,
                task_ends=self._settings.task_of_round(round + 1) != task,
            )
            tally = Tally(began=self._service.timeline.spent, wire=self._service.traffic())
            state = await self._attempts(context, tally)
            state, evaluation = await self._compute(self._settle, context, state)
            found = await self._conclude(tally.diagnosis, state)
            if round == 1 or self._settings.task_of_round(round - 1) != task:
                await self._show(task, state)
            row = tally.row(
                context,
                self._service.timeline,
                self._service.traffic(),
                evaluation=evaluation,
                before=self.standing.class_accuracy,
                diagnosis=found,
                remarks=self._algorithm.remarks(state) if isinstance(self._algorithm, Remarking) else None,
            )
            self._committing = asyncio.ensure_future(self._commit(round, state, evaluation, row, found))
            await asyncio.shield(self._committing)

    async def _reach(self, time: float) -> None:
        """Go on to a time of the experiment, if it is to come: the virtual clock jumps there, the wall clock takes its
        time, in which devices come and go as ever."""
        timeline = self._service.timeline
        timeline.advance(time)
        await self._service.until(lambda: timeline.time >= time, time - timeline.time)

    async def committed(self) -> None:
        """Wait for a commit under way."""
        if self._committing is not None:
            await asyncio.wait({self._committing})

    async def _attempts(self, context: Context, tally: Tally) -> S:
        """One round, tried again from its beginning while too few reply."""
        roster = self._service.roster
        own_states = roster.states()
        for attempt in range(self._settings.attempts):
            tally.attempts += 1
            tally.diagnosis = self._open_diagnosis(context.round)
            try:
                return await self._script(context, attempt, tally)
            except TooFewReplies as short:
                if short.diverged:
                    raise Diverged(
                        f"{short.needed} replies of round {context.round} were not finite, or beyond limits.max_norm"
                    ) from None
                roster.restore_states(own_states)
                last = short
                short_of = {"accepted": short.accepted, "needed": short.needed}
                self._observers.event("retry", round=context.round, attempt=attempt, **short_of)
            finally:
                self.perturbed |= tally.perturbed
        raise QuorumError(
            f"Round {context.round} got {last.accepted} of the {last.needed} replies that it needs, "
            f"{self._settings.attempts} times; "
            + (
                "ask more devices, lengthen fleet.deadline, or lower fleet.quorum."
                if last.failure is None
                else f"devices failed, saying: {last.failure}"
            )
        )

    async def _script(self, context: Context, attempt: int, tally: Tally) -> S:
        script = self._algorithm.round(self.standing.state, context)
        answer: Reply | Tree | None = None
        asked = False
        try:
            for ordinal in itertools.count():
                request = await self._compute(_advance, script, answer)
                match request:
                    case _Ended():
                        return request.state  # type: ignore[no-any-return]
                    case Ask():
                        asked = True
                        ask_id = AskId(context.round, attempt, ordinal)
                        answer = await self._asking.exchange(ask_id, request, context, tally)
                    case ServerJob():
                        # Before the first reply every attempt computes the same, so one result serves them all.
                        answer = await self._run_job(request, context.round, attempt if asked else 0, ordinal, tally)
                    case _:
                        raise ConfigurationError(
                            f"the algorithm's round yielded a {type(request).__name__}; it may yield Ask and ServerJob"
                        )
        finally:
            await self._compute(script.close)
        raise AssertionError("unreachable")

    async def _run_job(self, job: ServerJob, round: int, attempt: int, ordinal: int, tally: Tally) -> Tree:
        """Run a server job to its end; the observers see it advance."""
        began, done = self._service.timeline.spent, 0
        self._observers.server_job(job.name, round, done, job.steps)

        def stepped(step: int, steps: int) -> None:
            nonlocal done
            done = step
            self._observers.server_job(job.name, round, step, steps)

        def died(cause: str) -> None:
            self._observers.event("server_job_died", job=job.name, round=round, cause=cause)

        threads = self._settings.threads
        carry = await run_server_job(
            job, self._run.checkpoint, round, ordinal, stepped, attempt=attempt, threads=threads, died=died
        )
        seconds = self._service.timeline.spent - began
        tally.server_seconds += seconds
        self._observers.event("server_job", job=job.name, round=round, steps=done, seconds=seconds)
        return carry

    def _settle(self, context: Context, state: S) -> tuple[S, Evaluation | None]:
        """The state as a checkpoint would give it back, so that a resumed run computes with the same; and its worth."""
        tensors: dict[str, torch.Tensor] = {}
        outline = taken_apart(state, tensors)
        settled = put_together(outline, tensors, state)
        variables = self._algorithm.variables(settled)
        for name, tensor in variables.items():
            if not bool(torch.isfinite(tensor).all()):
                raise Diverged(f"{name} has values that are not finite after round {context.round}")
        due = context.task_ends or self._settings.due(context.round, self._settings.evaluate_every)
        return settled, self._evaluator.evaluate(variables, context.task) if due else None

    def _open_diagnosis(self, round: int) -> RoundDiagnosis | None:
        if self._diagnosis is None or not self._settings.due(round, self._settings.diagnose_every):
            return None
        return self._diagnosis.open(round, self._algorithm.variables(self.standing.state))

    async def _conclude(self, diagnosis: RoundDiagnosis | None, state: S) -> dict[str, Any] | None:
        if diagnosis is None:
            return None
        return await self._compute(diagnosis.conclude, self._algorithm.variables(state))

    async def _show(self, task: int, state: S) -> None:
        """Keep pictures of what the method generates in a task. A run goes on without them, and says so."""
        method, album = self._algorithm, self._album
        if album is None or not isinstance(method, Picturing):
            return

        def keep() -> None:
            if page := album.page(method, state, self._settings.seed):
                self._run.generated(task, page)

        try:
            await self._compute(keep)
        except Exception as error:
            detail = str(error) if isinstance(error, FedemuError) else f"{type(error).__name__}: {error}"
            self._observers.event("pictures_failed", task=task, detail=detail)

    async def _commit(
        self, round: int, state: S, evaluation: Evaluation | None, row: Row, found: dict[str, Any] | None
    ) -> None:
        """Make the round durable; begun once, it is carried to its end."""
        standing = self.standing
        class_accuracy = standing.class_accuracy if evaluation is None else evaluation.class_accuracy
        self._run.metrics(row)
        if found is not None:
            self._run.diagnosis(found)
        self._observers.event("checkpoint", round=round)
        timeline = self._service.timeline
        record = {
            "time": timeline.time,
            "spent": timeline.spent,
            "perturbed": self.perturbed,
            "class_accuracy": class_accuracy,
            "roster": self._service.roster.to_record(),
            "cursor": self._run.cursor(),
        }
        await self._compute(checkpoint.save, self._run.checkpoint, round, state, record)
        self.standing = Standing(round, state, class_accuracy, self.perturbed)
        self._service.reception.durable_round = round
        self._observers.round_finished(row)
        self._observers.traffic("emulated", "down", row.bytes_down or 0)
        self._observers.traffic("emulated", "up", row.bytes_up or 0)
        self._observers.traffic("wire", "down", row.wire_bytes_down or 0)
        self._observers.traffic("wire", "up", row.wire_bytes_up or 0)

    async def _compute(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._numerics, work, *arguments)


def _advance(script: Script[Any], answer: Reply | Tree | None) -> Ask | ServerJob | _Ended:
    """The script's next request; StopIteration cannot travel through a future."""
    try:
        return script.send(answer)
    except StopIteration as stop:
        return _Ended(stop.value)
