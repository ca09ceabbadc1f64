"""From a script's Ask to its Reply: which devices are asked, what they get, and how their replies are reduced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fedemu.algorithms.interface import (
    Ask,
    Context,
    CountingSteps,
    LocalProgram,
    Measuring,
    Query,
    Reply,
    Revealing,
)
from fedemu.coordinator.asks.ask import AskMachine, Terms
from fedemu.coordinator.asks.at_edges import AtEdges
from fedemu.coordinator.asks.exchange import Exchange
from fedemu.coordinator.asks.folding import Folding, collects
from fedemu.coordinator.asks.naming import named_devices
from fedemu.coordinator.asks.parts import AskParts
from fedemu.coordinator.asks.payload import PayloadTemplate
from fedemu.coordinator.asks.tensors import require_tensors, told_payload
from fedemu.coordinator.asks.virtual import VirtualAsk
from fedemu.coordinator.asks.wall import WallAsk
from fedemu.coordinator.evaluation.diagnosis import RoundDiagnosis
from fedemu.coordinator.fleet.columns import Mask
from fedemu.coordinator.fleet.online_times import FARTHEST, horizon, horizon_of_ask
from fedemu.coordinator.fleet.sampling import draw_cohort
from fedemu.coordinator.observer import Observers
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.coordinator.rounds.numerics import Numerics
from fedemu.coordinator.rounds.shortfall import Shortfall
from fedemu.coordinator.rounds.tally import Tally
from fedemu.coordinator.service.service import SPARE_UNFINISHED, Service, most_unfinished
from fedemu.coordinator.service.shelf import pack_tree
from fedemu.coordinator.settings import ceil_share
from fedemu.protocol.codec import DOWN, encode
from fedemu.protocol.errors import ConfigurationError, ProtocolError, QuorumError
from fedemu.protocol.ids import AskId, DeviceId
from fedemu.protocol.messages import TensorSpec
from fedemu.protocol.sharing.edge_messages import Gather


class TooFewReplies(Exception):
    """Too few replies were accepted. ``shortfall`` tells what became of the devices that were asked."""

    def __init__(self, shortfall: Shortfall) -> None:
        super().__init__(f"{shortfall.accepted} of at least {shortfall.needed} replies")
        self.shortfall = shortfall


class Asking:
    """Exchanges asks with the fleet, one at a time."""

    def __init__(
        self,
        plan: CoordinatorPlan,
        service: Service,
        numerics: Numerics,
        run: RunDirectory,
        observers: Observers,
    ) -> None:
        self._plan = plan
        self._settings = plan.settings
        self._service = service
        self._numerics = numerics
        self._run = run
        self._observers = observers

    async def exchange(self, ask_id: AskId, ask: Ask, context: Context, tally: Tally) -> Reply:
        """Carry out an ask and reduce its replies. Raises TooFewReplies if too few devices reply.

        Raises ConfigurationError if nobody is asked, and replies are needed, and QuorumError if no device is on-line,
        now or at any time that is known.
        """
        settings, service, compute = self._settings, self._service, self._numerics.compute
        with self._waiting(tally):
            cohort, wanted = await self._cohort(ask_id, ask, tally)
        if tally.announced != ask_id.attempt:
            tally.announced = ask_id.attempt
            self._observers.round_started(ask_id.round, ask_id.attempt, service.timeline.time, len(cohort))
        keeps = tally.diagnosis is not None or collects(ask.reduce)
        parts = await compute(self._prepare, ask_id, ask, context, cohort, keeps)
        terms = Terms(
            ask=ask_id,
            cohort=cohort,
            wanted=wanted,
            start=parts.start,
            deadline=settings.deadline,
            give_up=max(settings.give_up, settings.planned_silence),
            answer_timeout=settings.answer_timeout,
            resend=settings.heartbeat_seconds,
            optional=ask.optional,
        )
        kind: type[AskMachine] = VirtualAsk if settings.clock == "virtual" else WallAsk
        machine = kind(terms, service.roster.connected)
        folding = Folding(ask.reduce, parts.template.leaves, compute, keeps)
        gather = self._gather(parts, ask, tally)
        at_edges = AtEdges(gather, machine, folding, service.send, service.is_sending, self._observers)
        exchange = Exchange(
            parts, machine, service.roster, service.tell, service.reception.screening.refused, self._observers,
            compute, folding, at_edges,
        )  # fmt: skip
        try:
            with self._waiting(tally):
                await service.perform(exchange)
            self._conclude(exchange, tally)
            needed = 0 if ask.optional else max(1, ceil_share(settings.quorum, wanted))
            if len(machine.accepted) < needed:
                raise TooFewReplies(Shortfall.of(exchange, needed))
            if tally.diagnosis is not None:
                await self._diagnose(exchange, ask, tally.diagnosis)
            return await _reply(exchange, folding)
        finally:
            folding.close()
            exchange.discard()

    def _gather(self, parts: AskParts, ask: Ask, tally: Tally) -> Gather | None:
        """What edges are told of an ask whose sums alone are wanted. None if each reply has to come."""
        if self._settings.clock != "virtual" or tally.diagnosis is not None or not ask.reduce:
            return None
        reducers = []
        for key, reducer in ask.reduce.items():
            if reducer.kind == "collect":
                return None
            reducers.append((key, reducer.kind, reducer.key or key))
        leaves = parts.template.leaves.items()
        return Gather(
            ask=str(parts.ask),
            epoch=parts.epoch,
            leaves=tuple(TensorSpec(name=name, dtype=leaf.dtype, shape=leaf.shape) for name, leaf in leaves),  # type: ignore[arg-type]
            reducers=tuple(reducers),
            max_norm=parts.max_norm,
            # The connection of an edge may be in the middle of another message, too.
            most_bytes=min(self._settings.payload_bytes, most_unfinished(parts.template.bytes) - SPARE_UNFINISHED // 2),
        )

    @contextmanager
    def _waiting(self, tally: Tally) -> Iterator[None]:
        """The time of this block counts as a wait for devices."""
        began = self._service.timeline.spent
        try:
            yield
        finally:
            tally.waited += self._service.timeline.spent - began

    async def _cohort(self, ask_id: AskId, ask: Ask, tally: Tally) -> tuple[tuple[DeviceId, ...], int]:
        """The devices to ask, and how many replies are wanted. Waits or moves the clock until a device is there."""
        among = named_devices(ask, self._settings.devices)
        if among == ():  # nobody is named, so there is nobody to wait for
            eligible = self._service.roster.eligible(self._service.timeline.time)
        elif self._settings.clock == "virtual":
            eligible = await self._arrive(among, ask.optional, tally)
        else:
            eligible = await self._connect(ask_id, among)
        if tally.online is None:
            tally.joined = self._service.roster.joined
            tally.online = int(eligible.sum())
        if among is not None:
            cohort = tuple(device for device in among if eligible[device])
        elif ask.cohort == "online":
            cohort = tuple(map(DeviceId, np.flatnonzero(eligible).tolist()))
        else:
            cohort = draw_cohort(
                np.flatnonzero(eligible), self._settings.selected, seed=self._settings.seed, ask=ask_id
            )
            return cohort, self._settings.per_round
        return cohort, max(1, len(cohort))

    async def _arrive(self, among: Sequence[DeviceId] | None, optional: bool, tally: Tally) -> Mask:
        """The eligible devices, as a mask. If there are none, the clock jumps to the next arrival.

        Raises QuorumError if no arrival is known, unless the ask is ``optional``.
        """
        service, timeline = self._service, self._service.timeline
        while True:
            tally.perturbed |= not await service.extend(horizon_of_ask(timeline.time, self._settings.deadline))
            if service.roster.planned is not None:
                await self._numerics.compute(service.roster.planned.reach, timeline.time)
            eligible = service.roster.eligible(timeline.time)
            if eligible.any() if among is None else any(eligible[device] for device in among):
                return eligible
            arrival = service.roster.next_arrival(timeline.time, among)
            if arrival is not None and arrival <= service.reception.horizon:
                timeline.advance(arrival)
            elif service.reception.horizon < (farthest := horizon(timeline.time, FARTHEST)):
                tally.perturbed |= not await service.extend(min(2 * service.reception.horizon, farthest))
            elif optional:
                return eligible
            else:
                raise self._nobody(among)

    def _nobody(self, among: Sequence[DeviceId] | None) -> QuorumError:
        """The error if no device is on-line, or none of those that are named, now or at any time that is known."""
        nobody = "No device is" if among is None else "None of the devices that the algorithm names is"
        lost = self._service.roster.columns.lost
        if count := int((lost if among is None else lost[list(among)]).sum()):
            return QuorumError(
                f"{nobody} left to be asked: {count} had no connection for {self._settings.give_up:g} s "
                "(fleet.give_up); start the devices again, and go on with --resume."
            )
        return QuorumError(
            f"{nobody} on-line, and none has announced that it will be; make availability last longer, "
            "or let the trace wrap."
        )

    async def _connect(self, ask_id: AskId, among: Sequence[DeviceId] | None) -> Mask:
        """The connected devices, as a mask. If there is none, wait for one, ``deadline`` at most."""
        roster, settings = self._service.roster, self._settings

        def anybody() -> bool:
            return bool(roster.connected) if among is None else any(device in roster.connected for device in among)

        count = settings.devices if among is None else len(among)
        then = f"this try of the round is over (try {ask_id.attempt + 1} of {settings.attempts})"
        with self._service.waits.told(settings.deadline, lambda: count, then):
            await self._service.waits.until(anybody, settings.deadline)
        return roster.eligible(0.0)

    def _prepare(self, ask_id: AskId, ask: Ask, context: Context, cohort: Sequence[DeviceId], keeps: bool) -> AskParts:
        """The parts of an ask, whose replies are kept until its end or not. This takes long, so it runs in a thread."""
        try:
            program = self._plan.algorithm.programs[ask.program]
        except KeyError:
            known = ", ".join(sorted(self._plan.algorithm.programs))
            raise ConfigurationError(f"The algorithm asks for the program {ask.program!r}; it has {known}.") from None
        require_tensors(ask)
        template = PayloadTemplate.of(told_payload(ask.program, program, ask.shared))
        template.require_at_most(self._settings.payload_bytes, ask.program)
        each = ask.each or {}
        by_device = {device: pack_tree(each[device]) for device in cohort if device in each}
        for device, (_, frames) in by_device.items():
            if (size := sum(map(len, frames))) > DOWN.limits.message_bytes:
                raise ConfigurationError(
                    f"The algorithm gives device {device} {size} bytes of its own for {ask.program!r}, and a device "
                    f"reads at most {DOWN.limits.message_bytes}; give several devices the same in shared trees."
                )
        parts = AskParts(
            ask=ask_id,
            program=ask.program,
            task=context.task,
            start=self._service.timeline.time,
            deadline=self._settings.deadline,
            durable_round=self._service.reception.durable_round,
            epoch=self._service.reception.epoch,
            shared=self._service.shelf.publish(ask.shared),
            by_device=by_device,
            passes=program.passes,
            processed=program.processed if isinstance(program, CountingSteps) else 0.0,
            template=template,
            keeps_state=self._settings.replay or _keeps_own_state(program, ask),
            label_counts=self._plan.classes if program.declares_label_counts else None,
            max_norm=self._settings.max_norm,
            spill=self._run.spill if keeps else None,
            holdings=self._plan.holdings,
            measured=program.measured if isinstance(program, Measuring) else frozenset(),
        )
        _require_readable(parts, cohort)
        return parts

    def _conclude(self, exchange: Exchange, tally: Tally) -> None:
        """Tell the roster, the clock, the tally and the observers of the closed ask."""
        machine = exchange.machine
        assert machine.end is not None
        exchange.commit()
        self._service.timeline.advance(machine.end)
        tally.outcomes.update(machine.verdicts.values())
        tally.bytes_down += exchange.bytes_down
        tally.bytes_up += exchange.bytes_up
        tally.perturbed |= machine.perturbed
        self._run.ask(_line(exchange))
        for device, missed in sorted(machine.given_up.items()):
            told = {"lacked": missed.lacked, "waited": missed.seconds, "limit": missed.limit}
            self._observers.event("given_up", device=device, ask=exchange.text, **told, among=len(machine.given_up))
        for device, verdict in machine.verdicts.items():
            self._observers.device_result(verdict)
            if verdict == "dropped":
                cause, back = machine.causes.get(device), machine.away.get(device)
                tally.crashed += cause == "crash"
                self._observers.event("dropout", device=device, ask=exchange.text, cause=cause, back=back)
        for contribution in exchange.contributions:
            tally.count(contribution)

    async def _diagnose(self, exchange: Exchange, ask: Ask, diagnosis: RoundDiagnosis) -> None:
        """Examine the accepted devices' models, one at a time, so that a signal does not have to wait for all.

        A device without samples has trained nothing, so its model says nothing about training.
        """
        program = self._plan.algorithm.programs[ask.program]
        if isinstance(program, Revealing):
            contributions = [contribution for contribution in exchange.contributions if contribution.reply.examples]
            diagnosis.begin([contribution.reply.device for contribution in contributions])
            for contribution in contributions:
                assert contribution.payload is not None, "edges keep nothing of a round that is diagnosed"
                await self._numerics.compute(diagnosis.examine, program, ask.shared, contribution.payload)


def _line(exchange: Exchange) -> dict[str, Any]:
    """A closed ask as a line of ``asks.jsonl``: the devices, and of each its outcome and the time of its end."""
    parts, machine = exchange.parts, exchange.machine
    times = machine.times()
    cohort = machine.terms.cohort
    return {
        "ask": exchange.text,
        "round": parts.ask.round,
        "attempt": parts.ask.attempt,
        "program": parts.program,
        "start": machine.terms.start,
        "end": machine.end,
        "wanted": machine.terms.wanted,
        "devices": cohort,
        "outcomes": "".join(machine.verdicts[device][0] for device in cohort),
        "times": [None if (time := times.get(device)) is None else round(time, 3) for device in cohort],
    }


def _require_readable(parts: AskParts, cohort: Sequence[DeviceId]) -> None:
    """Raise ConfigurationError if a device of the cohort could not read its work. It would be silent."""
    # Devices differ in the trees of their own alone, and most of these have the same form.
    for device in {parts.part_of(device)[0]: device for device in cohort}.values():
        _, frames = parts.part_of(device)
        try:
            DOWN.decode(encode(parts.work(device, None, 0), frames))
        except ProtocolError as error:
            raise ConfigurationError(
                f"no device could read its work for the program {parts.program!r} that the algorithm asks for "
                f"({error}); docs/protocol.md tells what a 'work' may hold"
            ) from error


def _keeps_own_state(program: LocalProgram | Query, ask: Ask) -> bool:
    return hasattr(program, "initial_own") and bool(program.initial_own(ask.shared))


async def _reply(exchange: Exchange, folding: Folding) -> Reply:
    contributions = exchange.contributions
    if not contributions:  # only an optional ask may have none
        return Reply({}, ())
    values = await folding.values([each.payload for each in contributions if each.payload is not None])
    return Reply(values, tuple(contribution.reply for contribution in contributions))
