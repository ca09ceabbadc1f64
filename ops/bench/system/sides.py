"""The floor of the whole system: one process that makes the accepted updates, folds them, and evaluates each round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedemu.ops.assembly.parts import Parts
from fedemu.ops.bench.measuring.measure import Sample, timed
from fedemu.ops.bench.measuring.plain_loop import averaged, convolutional, perceptron, snapshot
from fedemu.ops.experiment.sources import load_experiment


def plain(preset: str, cohorts: Sequence[Sequence[int]], overrides: Sequence[str]) -> Callable[[], Sample]:
    """A measurement of one round for each of ``cohorts``, on the data and the partition of the preset.

    A cohort is a list of devices. The work is device updates.
    """
    torch.set_num_threads(1)
    experiment, _ = load_experiment(preset, list(overrides), {})
    parts, local = Parts(experiment), experiment.local
    corpus = parts.corpus
    data = [corpus.batch(corpus.train, parts.partition.device(device)[0]) for device in range(experiment.fleet.devices)]
    x, y = corpus.batch(corpus.test, np.arange(len(corpus.test)))
    model = perceptron() if experiment.model.name == "mlp" else convolutional()
    initial = snapshot(model)
    how = {"epochs": local.epochs, "batch_size": local.batch_size, "lr": local.lr, "order": np.random.default_rng(0)}

    def evaluate(state: dict[str, Tensor]) -> tuple[float, float]:
        model.load_state_dict(state)
        with torch.inference_mode():
            logits = model(x)
            return float((logits.argmax(1) == y).float().mean()), float(nn.functional.cross_entropy(logits, y))

    def play() -> int:
        state = initial
        for cohort in cohorts:
            state = averaged(model, state, [data[device] for device in cohort], **how)
            evaluate(state)
        return sum(map(len, cohorts))

    return timed(play)
