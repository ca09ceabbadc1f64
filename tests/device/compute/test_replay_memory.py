"""The memory that a trainer needs for a coordinated selection by a CNN of 2 million parameters.

``python test_replay_memory.py`` does it for 1,000 samples.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import torch

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.methods.fedavg import fedavg
from fedemu.algorithms.models.feed_forward import cnn
from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.replay.replay import with_replay
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.device.compute.executors.executor import Job, JobResult
from fedemu.device.compute.trainer import Trainer
from fedemu.protocol.ids import Digest

SAMPLES = 250
SHAPE = (3, 32, 32)


def test_a_selection_takes_less_than_an_eighth_of_the_matrix_of_all_gradients() -> None:
    """This runs in a process of its own, as a trainer does. The matrix G would take 2 GiB."""
    found = subprocess.run(
        [sys.executable, __file__, str(SAMPLES)], stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    parameters, before, peak = map(int, found.stdout.split())
    assert 2e6 < parameters < 3e6
    assert peak - before < 4 * SAMPLES * parameters / 8


def resident_bytes(key: str) -> int:
    """The resident memory of this process in bytes: now (``VmRSS``), or the largest so far (``VmHWM``)."""
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(key))


def main(samples: int) -> None:
    """Answer with the sum, then select against a target.

    Print the model's parameters, and the bytes of this process before it and at its peak. Before it there are Python
    and torch, which have 240 MB or, with libraries for GPUs, 680 MB.
    """
    before = resident_bytes("VmRSS")
    random = np.random.default_rng(0)
    split = Split(random.integers(0, 256, (samples, *SHAPE)).astype(np.uint8), random.integers(0, 10, samples), {})
    names = tuple("abcdefghij")
    corpus = Corpus("noise", split, split, names, SHAPE, np.full(3, 127.0), np.full(3, 70.0), Digest("0" * 64))
    model = cnn(SHAPE, 10)
    ingredients = Ingredients(model, cross_entropy, classes=10, epochs=1, batch_size=10, lr=0.1, input_shape=SHAPE)
    algorithm = with_replay(fedavg(ingredients), ReplaySettings("coordinated", budget=50, restarts=0), ingredients)
    trainer = Trainer(algorithm.programs, corpus, seed=1, device_type="cpu", selection=algorithm.selection)
    shared = {"model": model.init(0), "period": {"period": torch.tensor([0])}}
    job = Job(0, 1, 0, np.arange(samples), buffer=Buffer(), budget=50)
    (summed,) = trainer.run("gradient_sum", shared, [job])
    assert isinstance(summed, JobResult), summed
    mean = {name: leaf / 2 for name, leaf in summed.payload["change"].items()}
    again = Job(0, 1, 0, np.arange(samples), buffer=summed.buffer, budget=50)
    (selected,) = trainer.run("select", {**shared, "mean": mean}, [again])
    assert isinstance(selected, JobResult), selected
    assert selected.buffer is not None
    assert len(selected.buffer) == 50
    print(sum(leaf.numel() for leaf in shared["model"].values()), before, resident_bytes("VmHWM"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 1000)
