"""The floor of training: the loop that people write in PyTorch without a framework, ``nn.Module`` and ``torch.optim``.

It has one thread and the default memory layout. Its data are decoded and normalised beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

State = Mapping[str, Tensor]


def perceptron() -> nn.Module:
    """The network of the preset ``digits``: one hidden layer, for images of 8 x 8 and 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutional() -> nn.Module:
    """The two-convolution network for images of 3 x 32 x 32 and 10 classes."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


class _Block(nn.Module):
    """Two convolutions with a shortcut around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _unit(inputs, outputs, 3, stride)
        self.second = _unit(outputs, outputs, 3, 1)
        self.shortcut = nn.Identity() if (inputs, stride) == (outputs, 1) else _unit(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut: Tensor = self.shortcut(x)
        return nn.functional.relu(self.second(nn.functional.relu(self.first(x))) + shortcut)


def _unit(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.GroupNorm(2, outputs))


def residual() -> nn.Module:
    """ResNet-18 for images of 3 x 32 x 32 and 10 classes, with group normalisation, as the model ``resnet18``."""
    blocks = [
        _Block(inputs, outputs, stride)
        for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512))
        for inputs, stride in ((inputs, 1 if inputs == outputs else 2), (outputs, 1))
    ]
    return nn.Sequential(
        _unit(3, 64, 3, 1), nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10)
    )


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all variables of a model, by name."""
    return {name: value.clone() for name, value in model.state_dict().items()}


def device_update(
    model: nn.Module,
    start: State,
    data: tuple[Tensor, Tensor],
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    order: np.random.Generator,
) -> dict[str, Tensor]:
    """Train ``model`` from ``start`` on ``data``, a device's samples ``(x, y)``. Returns the change of each variable.

    ``order`` draws the order of the samples in each epoch.
    """
    x, y = data
    model.load_state_dict(start)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in torch.split(torch.from_numpy(order.permutation(len(y))), batch_size):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return {name: value - start[name] for name, value in model.state_dict().items()}


def averaged(model: nn.Module, start: State, cohort: Sequence[tuple[Tensor, Tensor]], **how: Any) -> dict[str, Tensor]:
    """The variables after a round of federated averaging.

    ``cohort`` are the samples of each device that trains, ``how`` is what ``device_update`` wants to know.
    """
    updates = [device_update(model, start, data, **how) for data in cohort]
    mean = {name: torch.zeros_like(value) for name, value in start.items()}
    samples = sum(len(y) for _, y in cohort)
    for update, (_, y) in zip(updates, cohort, strict=True):
        for name, value in update.items():
            mean[name] += value * (len(y) / samples)
    return {name: value + mean[name] for name, value in start.items()}
