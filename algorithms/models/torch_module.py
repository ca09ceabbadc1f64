"""Any ``torch.nn.Module`` as a model of pure functions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedemu.algorithms.interface import Outputs, Tree
from fedemu.algorithms.models.layers import batch_statistics
from fedemu.algorithms.trees import only

ModuleKind = Literal["dense", "convolutional"]
"""The kinds that a module can have. See ``interface.Kind``."""


class ModuleModel:
    """Runs a module with variables from outside. The state of the module itself does not matter.

    The module returns logits ``[batch, classes]``, or (logits, features), or Outputs. It must not draw random numbers
    (no dropout), and must not branch on values.
    """

    def __init__(self, module: nn.Module, kind: ModuleKind, initial: Callable[[int], Tree]) -> None:
        self.kind: ModuleKind = kind
        self._module = module
        self.buffers = frozenset(name for name, _ in module.named_buffers())
        self._initial = initial
        self._modes = {train: _skeleton(module, train) for train in (True, False)}

    def init(self, seed: int) -> Tree:
        return self._initial(seed)

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        # A module updates its buffers in place, so it gets copies.
        buffers = {name: leaf.clone() for name, leaf in only(variables, self.buffers).items()}
        out = functional_call(self._modes[train], {**variables, **buffers}, (x,))
        if isinstance(out, Outputs):
            return out, buffers
        logits, features = out if isinstance(out, tuple) else (out, out)
        return Outputs(logits, features, {}), buffers

    def observed(self) -> ModuleModel:
        """The same model with ``Outputs.statistics``: mean and variance of each batch normalisation's input."""
        return _Observed(self._module, self.kind, self._initial)


class _Observed(ModuleModel):
    def __init__(self, module: nn.Module, kind: ModuleKind, initial: Callable[[int], Tree]) -> None:
        super().__init__(module, kind, initial)
        self._statistics: dict[str, Tensor] = {}
        for mode in self._modes.values():
            for name, part in mode.named_modules():
                if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                    part.register_forward_pre_hook(partial(self._observe, name))

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        self._statistics = {}
        outputs, buffers = super().apply(variables, x, train)
        return outputs._replace(statistics={**outputs.statistics, **self._statistics}), buffers

    def _observe(self, name: str, part: nn.Module, given: tuple[Tensor, ...]) -> None:
        self._statistics.update(batch_statistics(name, given[0]))


def from_module(build: Callable[[], nn.Module], kind: ModuleKind | None = None) -> ModuleModel:
    """A model from a function that builds a module. Each ``init`` calls this function under its seed.

    If ``kind`` is None, it follows from the layers of the module.
    """

    def initial(seed: int) -> Tree:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = build()
        return {name: leaf.detach().clone() for name, leaf in (*module.named_parameters(), *module.named_buffers())}

    with torch.random.fork_rng(devices=[]):
        module = build()
    if kind is None:
        convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        kind = "convolutional" if any(isinstance(part, convolutions) for part in module.modules()) else "dense"
    return ModuleModel(module, kind, initial)


def _skeleton(module: nn.Module, train: bool) -> nn.Module:
    """A copy in the given mode. Its parameters need no gradient, because functional_call replaces all of them."""
    return copy.deepcopy(module).train(train).requires_grad_(False)
