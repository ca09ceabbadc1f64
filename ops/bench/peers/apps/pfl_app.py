"""The work for pfl-research: its federated averaging, its simulated backend and its PyTorch model, in one process.

Usage: ``python pfl_app.py WORK PROGRESS``. ``ops/bench/peers/work.py`` tells what the files are.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Classifier(nn.Sequential):
    """A network with the loss and the metrics that pfl asks of a model."""

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        """The loss of a batch."""
        self.train(not eval)
        return nn.functional.cross_entropy(self(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        """Nothing is measured between rounds."""
        return {}


def network(model: str) -> Classifier:
    """The perceptron for the digits, or the network with two convolutions."""
    if model == "mlp":
        return Classifier(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return Classifier(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def main(path: str, progress_path: str) -> None:
    """Do the work of the file ``path``."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    torch.set_num_threads(1)
    work = dict(np.load(path))
    settings = json.loads(str(work["settings"]))
    rounds, per_round = work["cohorts"].shape
    # pfl computes on the device that PFL_PYTORCH_DEVICE names, which is that of the settings.
    x, y = (torch.from_numpy(work[name]).to(settings["device"]) for name in ("x", "y"))

    def open_user(device: int) -> Dataset:
        """The samples of a device, as tensors, in a new order each time."""
        samples = np.random.permutation(work["samples"][work["starts"][device] : work["starts"][device + 1]])
        rows = torch.from_numpy(samples).to(x.device)
        return Dataset(raw_data=[x[rows], y[rows]], user_id=str(device))

    class Progress(TrainingProcessCallback):  # type: ignore[misc]
        """Tells when a round is over."""

        def after_central_iteration(
            self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            with open(progress_path, "a") as progress:
                progress.write("\n")
            if central_iteration == 0:
                sys.stdin.readline()  # the benchmark begins to measure
            return False, Metrics()

    users = iter(work["cohorts"].reshape(-1).tolist())
    data = FederatedDataset(open_user, lambda: next(users))
    module = network(settings["model"])
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=per_round,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=[WeightByDatapoints()]),
        PyTorchModel(
            module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        ),
        NNTrainHyperParams(
            local_num_epochs=settings["epochs"],
            local_learning_rate=settings["lr"],
            local_batch_size=settings["batch_size"],
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Progress()],
        send_metrics_to_platform=False,
    )
    sys.stdin.read()  # the benchmark reads the figures of this process first
    with torch.inference_mode():
        test_x, test_y = (torch.from_numpy(work[name]).to(settings["device"]) for name in ("test_x", "test_y"))
        right = module(test_x).argmax(1) == test_y
    print(json.dumps({"accuracy": float(right.float().mean())}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
