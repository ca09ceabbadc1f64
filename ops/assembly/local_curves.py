"""What devices learn and forget epoch by epoch, measured after a run: devices train once more from its last model.

In a run, devices send their models only after the last epoch. So the round that would come next is played here for some
devices, once with one epoch, once with two, and so on. A device's batches always begin with those of fewer epochs, so
the models are those of one training, looked at after each epoch. Only which images ``local.augment`` mirrors, and where
it cuts out, is drawn anew for each number of epochs. Nothing of this changes the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fedemu.algorithms.interface import Ask, LocalProgram, Revealing, Tree
from fedemu.algorithms.measures.forgetting import Floats, in_local, out_local, over_distribution
from fedemu.algorithms.models.frozen import frozen_of
from fedemu.algorithms.scripts import first_state, next_request
from fedemu.coordinator.evaluation.evaluate import Evaluator
from fedemu.coordinator.record import checkpoint
from fedemu.device.compute.executors.executor import Job, JobResult, Source
from fedemu.device.compute.rule import kind_of
from fedemu.device.compute.trainer import open_executor
from fedemu.ops.assembly.agreement import common
from fedemu.ops.assembly.computing import began_with
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.assembly.trial import try_out
from fedemu.ops.experiment import Experiment
from fedemu.protocol import seeds
from fedemu.protocol.errors import ConfigurationError


def local_curves(directory: Path, experiment: Experiment, devices: int | Sequence[int] = 10) -> dict[str, Any]:
    """The accuracy of devices' models after each epoch on their own distribution, and outside of it.

    The keys are those of ``local_curves.json`` (``docs/run_directory.md``). ``devices`` are device indices, or a number
    of devices to draw. There are as many epochs as in the experiment. A device begins without an own state, as on a
    first visit, and without a replay buffer.

    Raises ConfigurationError if the run has no checkpoint, if its data are others now, or if its method's rounds do not
    begin with the training of a model that the reply tells.
    """
    parts = Parts(experiment)
    if parts.corpus.language:
        raise ConfigurationError("local curves tell what models forget of classes, but the data are texts")
    initial = first_state(parts.algorithm, parts.variables, parts.context)
    loaded = checkpoint.load(directory / "checkpoint", initial)
    if loaded is None:
        raise ConfigurationError(f"{directory} has no checkpoint, from which devices could train; play a round first")
    checkpoint.require_data(loaded, common(parts.corpus.digest, frozen_of(parts.model)))
    round = loaded.round + 1
    chosen = list(devices) if isinstance(devices, Sequence) else _drawn(parts, round, devices)
    evaluator = Evaluator(parts.model, parts.corpus, parts.tests)
    counts = np.stack(
        [np.bincount(parts.corpus.train.y[_held(parts, d, round)], minlength=parts.corpus.classes) for d in chosen]
    )
    models = [[parts.algorithm.variables(loaded.state)] * len(chosen)]
    executor = try_out(parts, began_with(loaded.record)).executor
    for count in range(1, experiment.local.epochs + 1):
        models.append(_trained(parts, count, loaded.state, round, chosen, executor))
    accuracy: Floats = np.array([[evaluator.evaluate(model).class_accuracy for model in after] for after in models])
    return {
        "round": round,
        "devices": chosen,
        "epochs": list(range(len(models))),
        "in_local": over_distribution(accuracy, in_local(counts)).tolist(),
        "out_local": over_distribution(accuracy, out_local(counts)).tolist(),
    }


def _trained(parts: Parts, epochs: int, state: Any, round: int, devices: Sequence[int], named: str) -> list[Tree]:
    """The devices' models after so many epochs of the round, by the executor of this name."""
    experiment = parts.experiment
    local = experiment.local.model_copy(update={"epochs": epochs, "steps": 0})
    shorter = Parts(experiment.model_copy(update={"local": local}))
    task = parts.stream.period_of(round)
    context = replace(parts.context, round=round, task=task)
    script = shorter.algorithm.round(state, context)
    try:
        request = next_request(script, None, context, 0)
    finally:
        script.close()
    if not isinstance(request, Ask):
        raise ConfigurationError(
            f"a round of the method {experiment.algorithm.name!r} begins with a computation at the coordinator, "
            "so its local curves cannot be measured after the run"
        )
    program: Any = shorter.algorithm.programs[request.program]
    if not isinstance(program, Revealing):
        raise ConfigurationError(
            f"a reply to the method {experiment.algorithm.name!r} does not tell the device's model"
        )
    jobs = [Job(device, round, task, _held(parts, device, round)) for device in devices]
    executor = open_executor(
        named,
        kind_of(cast(LocalProgram, program), parts.model.kind),
        "cpu",
        parts.experiment.local.stack,
        variables=sum(leaf.numel() for leaf in parts.variables.values()),
    )
    source = Source(parts.corpus, experiment.seed, torch.device("cpu"))
    models = []
    for result in executor.run(cast(LocalProgram, program), request.shared, jobs, source):
        if not isinstance(result, JobResult):
            raise result
        models.append(program.local_model(request.shared, result.payload))
    return models


def _held(parts: Parts, device: int, round: int) -> Any:
    """The training samples that a device has at the end of the round's period, without a replay buffer."""
    return parts.stream.held(device, round, math.inf)


def _drawn(parts: Parts, round: int, count: int) -> list[int]:
    """Devices that have samples in the round, at most ``count``, drawn by the experiment's seed."""
    able = [device for device in range(parts.experiment.fleet.devices) if len(_held(parts, device, round))]
    draws = seeds.generator(parts.experiment.seed, round=round, purpose="local curves")
    return sorted(int(device) for device in draws.permutation(able)[:count])
