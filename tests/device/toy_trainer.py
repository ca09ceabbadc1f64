"""A trainer process that computes toy numbers without torch, in place of ``fedemu.device.compute.process``."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fedemu.device.bus import Done, JobFailed, Train
from fedemu.device.compute.nursery import run_nursery
from fedemu.device.compute.shell import Answer
from fedemu.device.memory.store import read_own, write_own
from fedemu.device.pipe import TrainerSetup
from fedemu.protocol.blobs.tree_file import decode_tree
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import AskId
from fedemu.protocol.messages import TensorSpec


def _toys() -> ModuleType:
    spec = importlib.util.spec_from_file_location("toys", Path(__file__).parent / "toys.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


toys = _toys()


class ToyRunner:
    """Computes a number for each job. The experiment says at which devices a job fails or kills the trainer."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.capacity = {"train": 8}
        self._settings = settings

    def run(self, train: Train, frames: Sequence[memoryview]) -> Iterable[Answer]:
        (shared,) = train.shared
        weight = float(decode_tree(Path(shared.path))["w"][0])
        place = 0
        for job in train.jobs:
            indices = np.frombuffer(frames[place], np.int64)
            place += job.tensors
            toys.maybe_die(self._settings, job.device)
            if job.device in self._settings.get("failing", ()):
                yield JobFailed(device=job.device, ask=train.ask, reason="training", detail="a toy failure"), ()
                continue
            own = float(read_own(Path(job.own))["v"][0]) if job.own else 0.0
            round = AskId.parse(train.ask).round
            value = weight + toys.train_like_a_toy(self._settings, job.device, round, indices.tolist(), own)
            write_own(Path(job.next_own), {"v": np.array([value])})
            done = Done(
                device=job.device,
                ask=train.ask,
                examples=len(indices),
                steps=1,
                metrics={"group": float(len(train.jobs))},
                label_counts=None,
                wrote_own=True,
                tensors=(TensorSpec(name="model/w", dtype="float64", shape=(1,)),),
            )
            yield done, [np.array([value]).tobytes()]


def open_runner(setup: TrainerSetup) -> ToyRunner:
    settings = json.loads(Path(setup.experiment).read_bytes())
    if settings.get("unusable_trainer"):
        raise ConfigurationError("This toy trainer cannot work.")
    toys.maybe_hang(settings)
    return ToyRunner(settings)


if __name__ == "__main__":
    sys.exit(run_nursery(sys.argv[1:], open_runner))
