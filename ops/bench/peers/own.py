"""Two of our sides: a plain PyTorch loop, and our trainer without a fleet. Both do the work of ``work.py``.

Usage: ``python -m fedemu.ops.bench.peers.own SIDE WORK PROGRESS``, where SIDE is ``plain`` or ``trainer``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.device.compute.executors.executor import Job
from fedemu.device.compute.trainer import Trainer
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.bench.measuring.plain_loop import averaged, convolutional, perceptron, snapshot
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import TrainingError

Cohort = NDArray[np.int64]
Side = tuple[Callable[[int, Cohort], None], Callable[[Tensor], Tensor]]
"""A function that plays a round with a cohort, and one that computes the logits of the model as it is then."""


def plain(work: Mapping[str, Any], settings: Mapping[str, Any]) -> Side:
    """The loop that people write without a framework: one process, one thread."""
    torch.set_num_threads(1)
    device = torch.device(settings["device"])
    model = (perceptron() if settings["model"] == "mlp" else convolutional()).to(device)
    state = snapshot(model)
    order = np.random.default_rng(0)
    x, y = (torch.from_numpy(work[name]).to(device) for name in ("x", "y"))
    data = [(x[held], y[held]) for held in map(torch.from_numpy, _held(work))]

    def play(round: int, cohort: Cohort) -> None:
        how = {name: settings[name] for name in ("epochs", "batch_size", "lr")}
        state.update(averaged(model, state, [data[device] for device in cohort], order=order, **how))

    def logits(x: Tensor) -> Tensor:
        model.load_state_dict(state)
        return model(x.to(device))  # type: ignore[no-any-return]

    return play, logits


def trainer(work: Mapping[str, Any], settings: Mapping[str, Any]) -> Side:
    """``Trainer``, as trainer processes use it, in groups of the size that it asks for."""
    experiment, _ = load_experiment(settings["preset"], list(settings["overrides"]), {})
    parts = Parts(experiment)
    model, programs = parts.model, parts.algorithm.programs
    trainer = Trainer(programs, parts.corpus, experiment.seed, device_type=settings["device"], kind=model.kind)
    capacity = trainer.capacity("train")
    state = dict(model.init(experiment.seed))
    held = _held(work)

    def play(round: int, cohort: Cohort) -> None:
        jobs = [Job(device=device, round=round, task=0, indices=held[device]) for device in cohort.tolist()]
        samples = sum(len(held[device]) for device in cohort)
        asked = {"model": dict(state)}
        mean = {name: torch.zeros_like(value) for name, value in state.items()}
        for start in range(0, len(jobs), capacity):
            for result in trainer.run("train", asked, jobs[start : start + capacity]):
                if isinstance(result, TrainingError):
                    raise result
                for name, value in result.payload["delta"].items():
                    mean[name].add_(value, alpha=result.examples / samples)
        state.update({name: value + mean[name] for name, value in state.items()})

    return play, lambda x: model.apply(state, x, False)[0].logits


def _held(work: Mapping[str, Any]) -> list[NDArray[np.int64]]:
    """The samples of each device."""
    return np.split(work["samples"], work["starts"][1:-1])


def main(side: str, path: str, progress: Path) -> None:
    """Do the work of the file ``path`` by the side of this name."""
    work = dict(np.load(path))
    play, logits = {"plain": plain, "trainer": trainer}[side](work, json.loads(str(work["settings"])))
    for round, cohort in enumerate(work["cohorts"], start=1):
        play(round, cohort)
        with progress.open("a") as file:
            file.write("\n")
        if round == 1:
            sys.stdin.readline()  # the benchmark begins to measure
    sys.stdin.read()  # the benchmark reads the figures of this process first
    with torch.inference_mode():
        right = logits(torch.from_numpy(work["test_x"])).argmax(1).cpu() == torch.from_numpy(work["test_y"])
    print(json.dumps({"accuracy": float(right.float().mean())}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
