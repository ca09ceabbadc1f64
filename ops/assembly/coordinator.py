"""The plan of a coordinator, put together from an experiment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.coordinator.evaluation.album import open_album
from fedemu.coordinator.evaluation.diagnosis import Diagnosis
from fedemu.coordinator.evaluation.evaluate import Evaluator
from fedemu.coordinator.observer import RunObserver
from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.settings import Settings
from fedemu.ops.assembly.learning import initial_variables, open_algorithm
from fedemu.ops.assembly.partition import build_partition
from fedemu.ops.assembly.public_data import open_public
from fedemu.ops.assembly.stream import open_stream
from fedemu.ops.assembly.trial import try_out
from fedemu.ops.data.apart import decode_apart
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.transport.interface import Network

MOST_HEARTBEATS = 500
"""Per second of the whole fleet: a larger one beats less often, or nothing else would be heard."""


def assemble(
    directory: Path, experiment: Experiment, network: Network, address: str, observers: Sequence[RunObserver] = ()
) -> CoordinatorPlan:
    """The plan of a run whose directory has been claimed, so that starting it and resuming it are the same."""
    torch.set_num_threads(experiment.server.threads)
    decode_apart(experiment, lambda text: print(text, file=sys.stderr, flush=True))
    corpus = open_corpus(experiment)
    model, algorithm = open_algorithm(experiment, corpus)
    partition = build_partition(corpus, experiment.data, devices=experiment.fleet.devices, seed=experiment.seed)
    stream, tests = open_stream(experiment, corpus, partition)
    variables = initial_variables(experiment, model)
    public = open_public(corpus, experiment.data, experiment.seed)
    try_out(experiment, corpus, model, algorithm, variables, public)
    evaluator = Evaluator(model, corpus, tests)
    diagnosis = None
    if experiment.diagnose.every:
        samples = experiment.diagnose.samples
        some = Evaluator(model, corpus, tests, samples=samples) if samples else evaluator
        diagnosis = Diagnosis(model, corpus, partition, some, stream)
    return CoordinatorPlan(
        address=address,
        network=network,
        settings=settings_of(experiment, stream),
        algorithm=algorithm,
        variables=variables,
        evaluator=evaluator,
        experiment=experiment.to_bytes(),
        partition=encode_tree(stream.to_arrays()),
        data=corpus.digest,
        classes=corpus.classes,
        directory=directory,
        config=experiment.to_toml(),
        resume=True,
        public=public,
        diagnosis=diagnosis,
        album=open_album(corpus),
        observers=observers,
    )


def settings_of(experiment: Experiment, stream: StreamPlan) -> Settings:
    """The rules of the run in the coordinator's terms."""
    fleet = experiment.fleet
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
        diagnose_every=experiment.diagnose.every,
        task_of_round=stream.period_of,
        task_begins=stream.begins,
        heartbeat_seconds=max(experiment.liveness.heartbeat_seconds, fleet.devices / MOST_HEARTBEATS),
        patience=experiment.liveness.patience,
        start_timeout=fleet.start_timeout,
        give_up=fleet.give_up,
        payload_bytes=experiment.limits.max_payload_bytes,
        max_norm=experiment.limits.max_norm,
        replay=experiment.replay.kept > 0,
        threads=experiment.server.threads,
    )
