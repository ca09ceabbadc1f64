"""A coordinator from its plan to its summary: it gathers the fleet, plays the rounds, and ends in good order."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedemu.algorithms.interface import Context, Tree
from fedemu.algorithms.scripts import first_state
from fedemu.algorithms.trees import model_digest
from fedemu.coordinator.fleet.admission import Admission
from fedemu.coordinator.fleet.journal import LEASES, LeaseJournal
from fedemu.coordinator.fleet.leases import Leases, Ranges, UnfitChangeError
from fedemu.coordinator.fleet.likeness import Likeness
from fedemu.coordinator.fleet.roster import Roster
from fedemu.coordinator.observer import EventLog, Observers, some_machines
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record import checkpoint
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.coordinator.record.summary import RunOutcome, Summary, summarize
from fedemu.coordinator.rounds.attempts import Diverged
from fedemu.coordinator.rounds.conclusions import Standing
from fedemu.coordinator.rounds.numerics import AT_ONCE_SECONDS, Numerics
from fedemu.coordinator.rounds.rounds import Rounds
from fedemu.coordinator.service.service import Service
from fedemu.coordinator.service.shelf import Shelf
from fedemu.coordinator.service.view import FleetView
from fedemu.coordinator.sums.partial import RULE
from fedemu.coordinator.timeline import Timeline
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.errors import ConfigurationError, FedemuError, Interrupted, QuorumError, UnreachableError
from fedemu.protocol.host.files import refusal_of
from fedemu.protocol.host.futures import done_before
from fedemu.protocol.host.hardware import host_name
from fedemu.protocol.host.stopping import hearing_stop
from fedemu.protocol.messages import Granted

_OTHER_SUMS = (
    "An earlier version of fedemu began this run, and rounded while it added replies. From here on they are added "
    "exactly, so the last bits may differ from those of a run by one version alone"
)


async def serve(plan: CoordinatorPlan) -> Summary:
    """Run an experiment to its end, from its beginning or from where its run directory left it.

    A run that diverges ends with a summary that says so. Raises UnreachableError if the fleet does not come,
    QuorumError if too few devices reply in every attempt, Interrupted after SIGINT or SIGTERM, ConfigurationError for
    an address or a directory that cannot be used. Once rounds can be played, all of these leave a summary and a
    checkpoint.
    """
    with (
        RunDirectory(plan.directory, diagnosed=plan.diagnosis is not None) as run,
        Numerics(plan.settings.threads, AT_ONCE_SECONDS) as numerics,
        Numerics(plan.settings.threads) as beside,
    ):
        return await Coordinator(plan, run, numerics, beside).run()


class Coordinator:
    """The parts of one coordinator, put together."""

    def __init__(self, plan: CoordinatorPlan, run: RunDirectory, numerics: Numerics, beside: Numerics) -> None:
        settings = plan.settings
        self._plan = plan
        self._run = run
        context = Context(0, settings.task_of_round(1), settings.seed, plan.classes, plan.public)
        initial = first_state(plan.algorithm, plan.variables, context)
        loaded = checkpoint.load(run.checkpoint, initial)
        if loaded is None and len(run.rows()) > 1:
            # One row may have been written just before the first checkpoint. A second row has a checkpoint before it.
            raise ConfigurationError(
                f"The run in {plan.directory} has played {len(run.rows())} rounds, but its checkpoint is gone; "
                "start it anew in another folder."
            )
        record: dict[str, Any] = {} if loaded is None else loaded.record
        journal = LeaseJournal(run.checkpoint / LEASES)
        granted_before = list(journal.entries(record.get("leases", 0)))
        if loaded is not None:
            _require_shapes(plan.algorithm.variables(loaded.state), plan.algorithm.variables(initial))
            checkpoint.require_data(loaded, plan.data)
        computed = record.get("compute", {})
        self._own = Likeness(settings.portable, settings.mixed_compute)
        self._take_up(computed)
        self._timeline = Timeline(settings.clock, record.get("time", 0.0), record.get("spent", 0.0))
        admission, planned = Admission(settings.devices, plan.quotas), plan.planned
        admission.asked(record.get("largest_reply", 0), 0)  # devices send again what the life before asked for
        roster = Roster(settings, journal.write, bool(granted_before), admission, planned, journal.replace)
        # A supervisor that was there before gets a while to come back before its indices can go to others.
        grace = min(settings.give_up, settings.start_timeout / 4)
        try:
            roster.leases.replay(granted_before, self._timeline.now() + grace - settings.give_up)
        except UnfitChangeError as error:
            raise journal.damaged(error.number) from error
        # Whatever refuses a resume comes before this, because the logs are cut here.
        damage = [*(() if loaded is None else loaded.damage), *run.rewind(record.get("cursor", {}))]
        run.about_data(plan.about)
        self._observers = Observers([EventLog(run.event, self._timeline), *plan.observers])
        if planned is not None:
            planned.reach(self._timeline.time)
        self._machines = roster.likeness
        self._machines.restore(computed.get("machines", ()))
        lost = 0
        if loaded is not None:
            roster.columns.restore(record["roster"])
            lost = sum(roster.columns.forget_states(*span) for span in _granted_since(record, roster.leases))
            roster.leases.go_on_from(record.get("leases", 0))
        shelf = Shelf(BlobStore(plan.directory / "blobs"))
        granted = partial(
            Granted,
            run=settings.run,
            experiment=shelf.keep("experiment", plan.experiment),
            partition=shelf.keep("partition", plan.partition),
            data=plan.data,
            heartbeat_seconds=settings.heartbeat_seconds,
            patience=settings.patience,
        )
        self._service = Service(settings, roster, shelf, self._timeline, self._observers, granted)
        standing = Standing(0, initial)
        if loaded is not None:
            accuracy = record["class_accuracy"]
            standing = Standing(
                loaded.round, loaded.state, None if accuracy is None else tuple(accuracy), record["perturbed"]
            )
        self._service.reception.durable_round = 0 if loaded is None else loaded.oldest
        if lost:
            self._service.reception.perturbed = True
            self._observers.event("own_states_lost", devices=lost)
        for sentence in damage:
            self._observers.event("damage", detail=sentence, round=standing.round)
        if record and record.get("sums") != RULE:
            self._observers.event("arithmetic", detail=_OTHER_SUMS, round=standing.round)
        self._rounds = Rounds(plan, run, self._service, standing, numerics, beside, self._observers, self._computed)

    async def run(self) -> Summary:
        """Run to the end, as ``serve`` describes it."""
        try:
            router = self._service.open(self._plan.network, self._plan.address)
            stopped: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            with hearing_stop(stopped.set_result):
                try:
                    if self._rounds.standing.round < self._plan.settings.rounds:
                        self._resume()
                        self._plan.opened(router.address)
                        self._plan.shown(FleetView(self._service))
                        await self._unless(stopped, self._gather())
                        self._run.go_on()
                        await self._unless(stopped, self._rounds.play())
                except Exception as error:
                    return await self._end(error)
                return await self._end(None)
        finally:
            self._service.close()
            self._service.shelf.close()

    def _take_up(self, computed: Mapping[str, Any]) -> None:
        """Go on with how this process computed before. Raises ConfigurationError if it computes otherwise now."""
        self._own.restore(computed.get("coordinator", ()))
        host = host_name()
        if sentence := self._own.refusal(self._plan.compute, host):
            raise ConfigurationError(f"The coordinator's machine is not like before: {sentence}")
        self._own.note(self._plan.compute, host)

    def _computed(self) -> dict[str, Any]:
        """How the run has been computed so far, in the form of JSON."""
        return {
            "coordinator": self._own.to_record(),
            "machines": self._machines.to_record(),
            "mixed": self._own.mixes or self._machines.mixes,
            "executor": self._plan.executor,
        }

    def _resume(self) -> None:
        """Tell observers where the run goes on, unless it begins."""
        if rows := self._run.rows():
            self._observers.resumed(rows, self._timeline.spent)
            self._observers.event("resume", round=self._rounds.standing.round + 1)

    async def _gather(self) -> None:
        """Wait for the whole fleet. A resumed run under the wall clock goes on with those devices that come.

        The part before went on without devices that left, too.
        """
        settings, roster = self._plan.settings, self._service.roster
        partly = settings.clock == "wall" and self._rounds.standing.round > 0
        if not await self._service.gather(partly=partly):
            missing = roster.missing()
            if partly and len(missing) < settings.devices:
                self._observers.event("fleet_incomplete", missing=len(missing))
                return
            holders = some_machines(roster.leases.hosts_of(missing))
            places = f" (places of the others were given to {holders})" if holders else ""
            raise UnreachableError(
                f"Only {settings.devices - len(missing)} of {settings.devices} devices came within "
                f"{settings.start_timeout:g} s{places}; start the others, set fewer with fleet.devices, or wait longer "
                "with fleet.start_timeout."
            )
        self._observers.event("fleet_complete", devices=settings.devices)

    async def _unless(self, stopped: asyncio.Future[str], coroutine: Coroutine[Any, Any, None]) -> None:
        """Run ``coroutine`` until it is done, a signal comes, or the coordinator itself has a fault."""
        task = asyncio.create_task(coroutine)
        try:
            finished = await done_before(task, stopped, self._service.reception.broken)
        finally:
            await self._rounds.at_rest()
        if finished:
            return task.result()
        if self._service.reception.broken.done():
            return self._service.reception.broken.result()
        raise Interrupted(
            f"Stopped after round {self._rounds.standing.round} of {self._plan.settings.rounds}; "
            f"go on with --resume {self._plan.directory}."
        )

    async def _end(self, error: Exception | None) -> Summary:
        """Write the results, tell the fleet, and raise the error unless the summary says everything."""
        outcome: RunOutcome
        match error:
            case None:
                outcome = "completed"
            case Diverged():
                outcome = "diverged"
            case QuorumError():
                outcome = "quorum"
            case Interrupted():
                outcome = "interrupted"
            case _:
                outcome = "failed"
        summary: Summary | None = None
        try:
            summary = self._write(error, outcome)
        except Exception as trouble:  # such as a full disk, or a method of the user's own that fails
            # The first error tells the cause, and the fleet has to hear of the end in any case.
            outcome, error = "failed", trouble if error is None or isinstance(error, Diverged) else error
        await self._service.stop("unreachable" if isinstance(error, UnreachableError) else outcome)
        if summary is not None and (error is None or isinstance(error, Diverged)):
            return summary
        assert error is not None
        if isinstance(error, OSError) and _is_within(error.filename, self._plan.directory):
            # The folder was fit for the run until now, so its name is not at fault, nor is fedemu.
            raise FedemuError(f"{error.filename} cannot be used: {refusal_of(error)}") from error
        raise error

    def _write(self, error: Exception | None, outcome: RunOutcome) -> Summary:
        """Write the summary and the model of a run that ends by this error, None if it is complete."""
        variables = {**self._plan.frozen, **self._plan.algorithm.variables(self._rounds.standing.state)}
        # The row of a round whose checkpoint the disk refused is there, but the round and its model are lost.
        rows = [row for row in self._run.rows() if row.round <= self._rounds.standing.round]
        summary = summarize(
            rows,
            name=self._plan.settings.run,
            outcome=outcome,
            seed=self._plan.settings.seed,
            model_digest=model_digest(variables),
            data_digest=self._plan.data_set,
            perturbed=self._rounds.perturbed,
            chance=self._plan.evaluator.chance,
            compute=self._computed(),
        )
        # Without a fleet there is nothing to summarise, unless rounds were played before.
        if not isinstance(error, UnreachableError) or rows:
            if isinstance(error, Diverged):
                self._observers.event("diverged", detail=str(error))
            self._run.finish(summary, variables)
        return summary


def _is_within(name: object, directory: Path) -> bool:
    """Whether the name of a file, as an OSError has it, is that of a file or a folder of a run."""
    return isinstance(name, str) and Path(name).is_relative_to(directory)


def _granted_since(record: Mapping[str, Any], leases: Leases) -> Ranges:
    """The devices that were leased anew after a checkpoint.

    Their machines do not have the own states that the checkpoint knows of. Earlier versions did not note how long the
    journal of leases was. One that is shorter now was removed.
    """
    known = record.get("leases", leases.changes)
    return leases.granted_since(known if known <= leases.changes else 0)


def _require_shapes(kept: Tree, fresh: Tree) -> None:
    """Raise ConfigurationError if the checkpoint's model is not one of this experiment's model, as it is now."""
    before, now = ({name: list(leaf.shape) for name, leaf in tree.items()} for tree in (kept, fresh))
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise ConfigurationError(
                f"The checkpoint's model is not this one: {name!r} has the shape {before.get(name, 'of nothing')} "
                f"there, and {now.get(name, 'of nothing')} here; undo what was changed in the model or the data, or "
                "start a new run."
            )
