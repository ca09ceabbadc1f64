"""The plan of a coordinator, made from an experiment."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from fedemu.algorithms.models.frozen import frozen_of
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.coordinator.asks.holdings import Holdings
from fedemu.coordinator.evaluation.album import open_album
from fedemu.coordinator.evaluation.diagnosis import Diagnosis
from fedemu.coordinator.evaluation.evaluate import Evaluator
from fedemu.coordinator.evaluation.threads import most_threads
from fedemu.coordinator.fleet.planned_times import PlannedTimes
from fedemu.coordinator.observer import RunObserver
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.data_file import about
from fedemu.coordinator.record.records import newest_record
from fedemu.coordinator.settings import Settings
from fedemu.device.compute.environment import hold_to_portable
from fedemu.ops.assembly.agreement import common
from fedemu.ops.assembly.behaviours import intervals
from fedemu.ops.assembly.computing import began_with
from fedemu.ops.assembly.named_code import record, with_digests
from fedemu.ops.assembly.trial import tried_parts
from fedemu.ops.experiment import Always, Experiment
from fedemu.ops.terminal import say
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.transport.interface import Network

VERDICT_DELAY = 1.0
"""Real seconds for which an outcome may wait for the device's next work. A foreign device may wait for it, too."""


def assemble(
    directory: Path, experiment: Experiment, network: Network, address: str, observers: Sequence[RunObserver] = ()
) -> CoordinatorPlan:
    """Make the plan of a run whose directory has been claimed. It is the same plan for a new run and for a resumed one.

    Decodes the data and tries the first step. Raises ConfigurationError or DataError if the experiment cannot be run.
    """
    torch.set_num_threads(experiment.server.threads)
    if experiment.compute.portable:
        hold_to_portable("cpu")
    newest = newest_record(directory / "checkpoint")
    parts = tried_parts(experiment, say, "" if newest is None else began_with(newest["record"]))
    sent = with_digests(parts.experiment)
    record(directory, sent.code, say)
    corpus, model, stream = parts.corpus, parts.model, parts.stream
    frozen = frozen_of(model)
    held_back = parts.partition.validation_indices if experiment.evaluate.validation else None
    threads = most_threads(experiment.server.threads)
    part = experiment.evaluate.samples
    evaluator = Evaluator(model, corpus, parts.tests, part=part, validation=held_back, threads=threads)
    diagnosis = None
    if experiment.diagnose.every:
        samples = experiment.diagnose.samples
        some = Evaluator(model, corpus, parts.tests, samples=samples, threads=threads) if samples else evaluator
        diagnosis = Diagnosis(model, corpus, parts.partition, some, stream)
    return CoordinatorPlan(
        address=address,
        network=network,
        settings=settings_of(experiment, stream),
        algorithm=parts.algorithm,
        variables=parts.variables,
        # A round is evaluated while the next one computes, and a model may keep something while it is applied.
        evaluator=evaluator.of(copy.deepcopy(model)),
        experiment=sent.to_bytes(),
        partition=encode_tree(stream.to_arrays()),
        data=common(corpus.digest, frozen),
        data_set=corpus.digest,
        classes=corpus.classes,
        directory=directory,
        frozen=frozen,
        about=about(corpus),
        public=parts.public,
        executor=parts.experiment.local.executor,
        diagnosis=diagnosis,
        album=open_album(corpus),
        planned=planned_times(experiment) if experiment.fleet.wake == "on-demand" else None,
        holdings=Holdings(stream.arrivals, corpus.train.y, corpus.classes),
        observers=observers,
    )


def planned_times(experiment: Experiment) -> PlannedTimes:
    """The on-line times of all devices as the experiment plans them."""
    always = isinstance(experiment.availability, Always)
    return PlannedTimes(experiment.fleet.devices, None if always else partial(intervals, experiment))


def settings_of(experiment: Experiment, stream: StreamPlan) -> Settings:
    """The settings of the coordinator: the rules of the run that it has to know."""
    fleet, liveness = experiment.fleet, experiment.liveness
    heartbeat = liveness.interval(fleet.awake)
    return Settings(
        run=experiment.name,
        seed=experiment.seed,
        rounds=experiment.rounds,
        devices=fleet.devices,
        per_round=fleet.per_round,
        over_selection=fleet.over_selection,
        deadline=fleet.deadline,
        quorum=fleet.quorum,
        attempts=fleet.attempts,
        clock=experiment.clock.kind,
        evaluate_every=experiment.evaluate.every,
        evaluate_all_every=experiment.evaluate.full_every if experiment.evaluate.samples else 0,
        diagnose_every=experiment.diagnose.every,
        task_of_round=stream.period_of,
        task_begins=stream.begins,
        heartbeat_seconds=heartbeat,
        patience=liveness.patience,
        # Until the coordinator has noticed the silence, and one heartbeat more.
        planned_silence=heartbeat * (liveness.patience + 1) if experiment.faults.silence_rate else 0.0,
        start_timeout=fleet.start_timeout,
        give_up=fleet.give_up,
        verdict_delay=VERDICT_DELAY,
        answer_timeout=fleet.answer_timeout,
        payload_bytes=experiment.limits.max_payload_bytes,
        max_norm=experiment.limits.max_norm,
        replay=experiment.replay.kept > 0,
        portable=experiment.compute.portable,
        threads=experiment.server.threads,
    )
