"""Adam as pure functions of tensors. It has the methods of ``local_sgd.SGD``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedemu.algorithms.interface import Tree
from fedemu.algorithms.trees import widened, zeros_like


@dataclass(frozen=True)
class Adam:
    """``m = β₁m + (1-β₁)g; v = β₂v + (1-β₂)g²; w -= lr · m̂ / (√v̂ + ε)``, with torch's defaults (Kingma & Ba, 2015).

    The hats are divisions by ``1 - β^t``; t counts steps from 1. The memory is one tree with the leaves ``mean/NAME``,
    ``square/NAME`` and ``steps``. It is float32 at least: in half precision small squares would be 0, and ε as well.
    """

    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8

    def begin(self, trained: Tree) -> Tree:
        """The memory before the first step: zeros, on the device of what is trained."""
        zeros = zeros_like(widened(trained))
        device = next(iter(trained.values())).device
        return {
            **{f"mean/{name}": leaf for name, leaf in zeros.items()},
            **{f"square/{name}": leaf for name, leaf in zeros.items()},
            "steps": torch.zeros((), dtype=torch.float64, device=device),
        }

    def step(self, trained: Tree, gradients: Tree, memory: Tree, lr: Tensor) -> tuple[Tree, Tree]:
        """The next variables and memory. Nothing is changed in place."""
        steps = memory["steps"] + 1
        after: dict[str, Tensor] = {}
        kept: dict[str, Tensor] = {"steps": steps}
        wide = widened(gradients)
        mean_weight, square_weight = 1 - self.first_decay**steps, 1 - self.second_decay**steps
        for name, leaf in trained.items():
            gradient = wide[name]
            mean = torch.lerp(memory[f"mean/{name}"], gradient, 1 - self.first_decay)
            square = torch.lerp(memory[f"square/{name}"], gradient.square(), 1 - self.second_decay)
            slope = mean / mean_weight
            move = lr * slope / ((square / square_weight).sqrt() + self.epsilon)
            after[name] = (leaf - move).to(leaf.dtype)
            kept[f"mean/{name}"], kept[f"square/{name}"] = mean, square
        return after, kept
