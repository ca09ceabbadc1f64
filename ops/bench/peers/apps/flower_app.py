"""The work as an app of Flower: its simulation with Ray, its FedAvg, one CPU for each client as by default.

Usage: ``python flower_app.py WORK PROGRESS``. ``ops/bench/peers/work.py`` tells what the files are.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch
from torch import nn


def network(model: str) -> nn.Module:
    """The perceptron for the digits, or the network with two convolutions."""
    if model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


opened: dict[str, Any] = {}
"""The work, which is read once in each process."""


def open_work(path: str) -> dict[str, Any]:
    """The arrays of the work, with its settings."""
    if not opened:
        torch.set_num_threads(1)  # a client has one CPU
        opened.update(np.load(path))
        opened["settings"] = json.loads(str(opened["settings"]))
    return opened


def main(path: str, progress_path: str) -> None:
    """Do the work of the file ``path``."""
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    work = open_work(path)
    devices = len(work["starts"]) - 1

    def train(message: Message, context: Context) -> Message:
        work, device = open_work(path), int(context.node_config["partition-id"])
        settings = work["settings"]
        model = network(settings["model"])
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=settings["lr"])
        samples = work["samples"][work["starts"][device] : work["starts"][device + 1]]
        x, y = torch.from_numpy(work["x"][samples]), torch.from_numpy(work["y"][samples])
        for _ in range(settings["epochs"]):
            for batch in torch.split(torch.randperm(len(y)), settings["batch_size"]):
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        metrics = MetricRecord({"num-examples": len(y)})
        content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    def serve(grid: Grid, context: Context) -> None:
        rounds, per_round = work["cohorts"].shape
        model = network(work["settings"]["model"])

        def after_round(round: int, arrays: ArrayRecord) -> None:
            if round:
                with open(progress_path, "a") as progress:
                    progress.write("\n")
            if round == 1:
                sys.stdin.readline()  # the benchmark begins to measure
            if round == rounds:
                sys.stdin.read()  # the benchmark reads the figures of this process first
                model.load_state_dict(arrays.to_torch_state_dict())
                with torch.inference_mode():
                    right = model(torch.from_numpy(work["test_x"])).argmax(1) == torch.from_numpy(work["test_y"])
                print(json.dumps({"accuracy": float(right.float().mean())}), flush=True)

        strategy = FedAvg(
            fraction_train=per_round / devices,
            fraction_evaluate=0.0,
            min_train_nodes=per_round,
            min_available_nodes=devices,
        )
        initial = ArrayRecord(model.state_dict())
        strategy.start(grid, initial, rounds, train_config=ConfigRecord(), evaluate_fn=after_round)

    client_app, server_app = ClientApp(), ServerApp()
    client_app.train()(train)
    server_app.main()(serve)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=devices, backend_config=resources)


if __name__ == "__main__":
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    main(*sys.argv[1:3])
