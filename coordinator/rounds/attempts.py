"""One round of the algorithm's script: its asks become exchanges, its server jobs processes, and it may be tried again.

``rounds.py`` makes a row and a checkpoint of what comes out.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from fedemu.algorithms.interface import Algorithm, Ask, Context, DeviceReply, Reply, Script, ServerJob, Tree
from fedemu.algorithms.scripts import next_request
from fedemu.algorithms.trees import model_digest
from fedemu.coordinator.evaluation.diagnosis import RoundDiagnosis
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.rounds.asking import Asking, TooFewReplies
from fedemu.coordinator.rounds.numerics import Numerics
from fedemu.coordinator.rounds.server_job import run_server_job
from fedemu.coordinator.rounds.server_job_worker import Place
from fedemu.coordinator.rounds.shortfall import Shortfall
from fedemu.coordinator.rounds.tally import Tally
from fedemu.coordinator.service.service import Service
from fedemu.protocol.code.own_code import Elsewhere
from fedemu.protocol.errors import ConfigurationError, QuorumError
from fedemu.protocol.ids import AskId, digest_of
from fedemu.protocol.wording import an_object

S = TypeVar("S")


class Diverged(Exception):
    """The model is not finite any more, or too many replies are not."""


class _Ended(NamedTuple):
    """The end of a script, with the state that it returned."""

    state: Any


class Attempts(Generic[S]):
    """Plays the script of a round, and starts it again while too few devices reply."""

    def __init__(
        self,
        plan: CoordinatorPlan,
        asking: Asking,
        service: Service,
        checkpoint: Path,
        numerics: Numerics,
        observers: Observers,
        at_rest: Callable[[], Awaitable[None]],
    ) -> None:
        """``checkpoint`` is the folder in which server jobs keep how far they are.

        ``at_rest`` waits until nothing is computed beside the rounds. Every server job waits for that.
        """
        self._settings = plan.settings
        self._algorithm: Algorithm[S] = plan.algorithm
        self._asking = asking
        self._service = service
        self._diagnosis = plan.diagnosis
        self._checkpoint = checkpoint
        self._numerics = numerics
        self._observers = observers
        self._at_rest = at_rest

    async def play(self, state: S, context: Context, tally: Tally) -> S:
        """The state after the round, which starts from ``state``. The tally counts what every attempt cost.

        Raises QuorumError if every attempt had too few replies, or if no device will be on-line any more, Diverged if
        the last one had enough with those that were not finite. Before it another cohort is asked, because such a reply
        may be a single device's damage. Attempts in which own states turn out to be lost are further ones.
        """
        columns, shortfall = self._service.roster.columns, Shortfall()
        columns.begin_round()
        left = self._settings.attempts
        for attempt in itertools.count():
            tally.attempts += 1
            tally.diagnosis = self._open_diagnosis(context.round, state)
            try:
                return await self._script(state, context, attempt, tally)
            except TooFewReplies as short:
                columns.begin_again()
                last = short.shortfall
                shortfall.add(last)
                # Where own states are lost, each device fails once. If that could end the run, a resumed one would fail
                # in the same way, because its checkpoint knows those states still.
                left -= not last.forgotten
                if not left:
                    break
                short_of = {"accepted": last.accepted, "needed": last.needed}
                self._observers.event("retry", round=context.round, attempt=attempt, **short_of)
        if last.diverged:
            raise Diverged(
                f"{last.exploded} of the {last.accepted + last.exploded} replies of round {context.round} "
                f"{'was' if last.exploded == 1 else 'were'} not finite, or beyond limits.max_norm"
            )
        tries = tally.attempts
        when = f"in the last of its {tries} tries" if tries > 1 else "in its only try"
        raise QuorumError(
            f"Round {context.round} got {last.accepted} of the {last.needed} replies that it needs {when}; "
            f"{shortfall.advice(self._settings)}"
        ) from (None if shortfall.failure is None else Elsewhere(shortfall.failure))

    async def _script(self, state: S, context: Context, attempt: int, tally: Tally) -> S:
        """One attempt: the script's requests are carried out until it returns the next state."""
        script = self._algorithm.round(state, context)
        answer: Reply | Tree | None = None
        heard: list[tuple[DeviceReply, ...]] = []
        position = 0
        try:
            while True:
                request = await self._numerics.compute(_advance, script, answer, context, position)
                match request:
                    case _Ended():
                        if request.state is None:
                            raise ConfigurationError(
                                "the algorithm's round ended without a state; it must return the next one"
                            )
                        if type(request.state) is not type(state):
                            raise ConfigurationError(
                                f"the algorithm's round returned {an_object(request.state)}; it must return the next "
                                f"state, {an_object(state)} as before"
                            )
                        return request.state
                    case Ask():
                        # Server jobs don't count here, so methods with and without them ask the same devices.
                        ask_id = AskId(context.round, attempt, len(heard))
                        answer = await self._asking.exchange(ask_id, request, context, tally)
                        heard.append(answer.devices)
                    case ServerJob():
                        # Before the first reply every attempt computes the same, so one result serves them all.
                        shared = attempt if heard else 0
                        basis = await self._numerics.compute(self._basis, state, heard)
                        seed = self._settings.seed
                        place = Place(self._checkpoint, context.round, shared, position, seed, basis)
                        answer = await self._run_job(request, place, tally)
                    case _:
                        inner = isinstance(request, Generator)
                        raise ConfigurationError(
                            f"the algorithm's round yielded {an_object(request)}; it may yield Ask and ServerJob"
                            + (", and `yield from` plays the round of another method" if inner else "")
                        )
                position += 1
        except BaseException:
            await self._numerics.compute(script.close)
            raise

    def _basis(self, state: S, heard: Sequence[tuple[DeviceReply, ...]]) -> str:
        """A digest of what a server job begins from: the model before the round, and the replies so far.

        After an accident, or by the wall clock, the next life of the coordinator may have others.
        """
        return digest_of(model_digest(self._algorithm.variables(state)).encode(), repr(heard).encode())

    async def _run_job(self, job: ServerJob, place: Place, tally: Tally) -> Tree:
        """Run a server job to its end; the observers see it advance."""
        await self._at_rest()
        began, done, round = self._service.timeline.spent, 0, place.round
        self._observers.server_job(job.name, round, done, job.steps)

        def stepped(step: int) -> None:
            nonlocal done
            done = step
            self._observers.server_job(job.name, round, step, job.steps)

        def died(cause: str) -> None:
            self._observers.event("server_job_died", job=job.name, round=round, cause=cause)

        carry = await run_server_job(job, place, self._settings, stepped, died)
        seconds = self._service.timeline.spent - began
        tally.server_seconds += seconds
        self._observers.event("server_job", job=job.name, round=round, steps=done, seconds=seconds)
        return carry

    def _open_diagnosis(self, round: int, state: S) -> RoundDiagnosis | None:
        """The diagnosis of a round, None if the round is not to be diagnosed."""
        if self._diagnosis is None or not self._settings.due(round, self._settings.diagnose_every):
            return None
        return self._diagnosis.open(round, self._algorithm.variables(state))


def _advance(
    script: Script[Any], answer: Reply | Tree | None, context: Context, position: int
) -> Ask | ServerJob | _Ended:
    """The script's next request. A StopIteration cannot pass through a future, so the end is a value too."""
    try:
        return next_request(script, answer, context, position)
    except StopIteration as stop:
        return _Ended(stop.value)
