"""Any ``torch.nn.Module`` as a model of pure functions."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from fedemu.algorithms.interface import Outputs, Tree
from fedemu.algorithms.models.frozen import fixed_tensors, resting_parts, saved_tensors
from fedemu.algorithms.models.layers import batch_statistics
from fedemu.algorithms.models.randomness.random_functions import repeatable
from fedemu.algorithms.models.spectral import BySpectra
from fedemu.algorithms.trees import map_leaves, only, views
from fedemu.protocol.code.own_code import account
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.generators import seeded

T = TypeVar("T")
ModuleKind = Literal["dense", "convolutional"]
"""The kinds that a module can have. See ``interface.Kind``."""
Build = Callable[[int], nn.Module]
"""Builds the module anew under a seed."""


class ModuleModel:
    """Runs a module with variables from outside, and with its own frozen tensors.

    Variables are the parameters that require a gradient, and the buffers of all parts that have one of these or lie
    beside them. Of ``module`` only the frozen tensors matter, and ``frozen`` has them. A part whose parameters are all
    frozen is always applied as in evaluation.

    What the module may return is told by ``outputs_of``. What it draws follows from a key (``random_functions.py``);
    outside of training it is a fixed one. Raises ConfigurationError if nothing is trained.
    """

    def __init__(self, module: nn.Module, kind: ModuleKind, build: Build) -> None:
        self.kind: ModuleKind = kind
        self._module = module
        self._build = build
        self._resting = resting_parts(module)
        fixed = fixed_tensors(module, self._resting)
        self.buffers = frozenset(name for name, _ in module.named_buffers()) - fixed.keys()
        self.frozen: Tree = saved_tensors(module, fixed)
        self._fixed: Tree = map_leaves(Tensor.detach, fixed)
        self._copies: dict[tuple[torch.device, bool], Tree] = {(torch.device("cpu"), False): self._fixed}
        self._last: tuple[Tensor, Tensor] | None = None
        """The input and the output of the linear layer that was applied last."""
        self._after: Tree = {}
        """The buffers at the end of the last application, of which a module may have replaced some."""
        self._modes = {train: self._skeleton(train, fixed) for train in (True, False)}

    def init(self, seed: int) -> Tree:
        module = self._build(seed)
        leaves = (*module.named_parameters(), *module.named_buffers())
        return {name: leaf.detach().clone() for name, leaf in leaves if name not in self._fixed}

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        # A module updates its buffers in place, and may write to its input, so it gets copies. A batch in training is a
        # copy already. Otherwise samples are kept, and read again.
        buffers = {name: leaf.clone() for name, leaf in only(variables, self.buffers).items()}
        x = x if train else x.clone()
        if not train and torch.is_inference_mode_enabled():
            # It may give its parameters other memory (``weight.data = ...``), with which only training goes on.
            variables = views(variables)
        self._last = None
        with repeatable(), BySpectra():
            out = functional_call(self._modes[train], {**self._beside(x), **variables, **buffers}, (x,))
        outputs, after = outputs_of(out), self._after
        if self._last is not None and self._last[1] is outputs.logits and outputs.features is outputs.logits:
            outputs = outputs._replace(features=self._last[0])
        self._last, self._after = None, {}
        return outputs, {name: after[name] for name in buffers}

    def module(self, train: bool) -> nn.Module:
        """The module that is applied in this mode. Its parameters and buffers have the values of no call."""
        return self._modes[train]

    def observed(self) -> ModuleModel:
        """The same model with ``Outputs.statistics``: mean and variance of each batch normalisation's input."""
        return _Observed(self._module, self.kind, self._build)

    def _skeleton(self, train: bool, fixed: Tree) -> nn.Module:
        """A copy in the given mode, which shares the frozen tensors. functional_call replaces all others."""
        made = copy.deepcopy(self._module, {id(leaf): leaf for leaf in fixed.values()}).train(train)
        for name in self._resting:
            made.get_submodule(name).train(False)
        for part in made.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(self._applied)
        made.register_forward_hook(self._ended)
        return made.requires_grad_(False)

    def _applied(self, part: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        if given:
            self._last = given[0], output

    def _ended(self, module: nn.Module, given: tuple[Tensor, ...], output: object) -> None:
        self._after = dict(module.named_buffers())

    def _beside(self, x: Tensor) -> Tree:
        """The frozen tensors on the device of ``x``, and in float64 if ``x`` is. They are copied once."""
        exact = x.dtype == torch.float64
        if (x.device, exact) not in self._copies:

            def copied(leaf: Tensor) -> Tensor:
                return leaf.to(x.device, torch.float64 if exact and leaf.is_floating_point() else None)

            # A thread of its own is outside of the transformations and recorders that may be around this call, so that
            # these do not take part in the copies.
            with ThreadPoolExecutor(1) as thread:
                self._copies[x.device, exact] = thread.submit(map_leaves, copied, self._fixed).result()
        return self._copies[x.device, exact]


def outputs_of(out: Any) -> Outputs:
    """What a module returned, as Outputs.

    It may be logits ``[batch, classes]``; a tuple whose first part are the logits, and whose second and last part may
    be the features; a mapping with ``logits`` and perhaps ``features``; or an object with these attributes, such as the
    outputs of Hugging Face's models. Without features the logits stand in their place.
    """
    if isinstance(out, Outputs):
        return out
    logits, features = out, None
    if isinstance(out, Mapping):
        logits, features = out.get("logits"), out.get("features")
    elif not isinstance(out, Tensor) and hasattr(out, "logits"):
        logits, features = out.logits, getattr(out, "features", None)
    elif isinstance(out, tuple | list) and out:
        logits, features = out[0], out[1] if len(out) == 2 else None
    return Outputs(logits, features if isinstance(features, Tensor) else logits, {})


class _Observed(ModuleModel):
    def __init__(self, module: nn.Module, kind: ModuleKind, build: Build) -> None:
        super().__init__(module, kind, build)
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


def from_module(build: Callable[[], nn.Module], seed: int = 0) -> ModuleModel:
    """A model from a function that builds a module. Each ``init`` calls this function under its seed.

    What is frozen is built under ``seed``. The kind of the model follows from the layers of the module. Raises
    ConfigurationError if nothing in the module is trained, if it has a layer without sizes, such as LazyLinear, or a
    hook for the gradient of a parameter, or if it can't be copied.
    """
    module = under_seed(build, seed)
    for name, leaf in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(leaf):
            raise ConfigurationError(
                f"{name!r} of the module {type(module).__name__} has no size before the first batch, and the first "
                "variables are made before it; take a layer with sizes, such as nn.Linear in place of nn.LazyLinear"
            )
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"{name!r} of the module {type(module).__name__} has a hook for its gradient, which nobody would call, "
                "because each device has a tensor of its own in place of the parameter; change gradients by a "
                "'direction' of the method, as in ingredients.local_sgd(direction=...)"
            )
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    kind: ModuleKind = "convolutional" if any(isinstance(part, convolutions) for part in module.modules()) else "dense"
    _detach_what_hooks_make(module)
    try:
        return ModuleModel(module, kind, lambda other: module if other == seed else under_seed(build, other))
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"the module {type(module).__name__} must be one that copy.deepcopy can copy, and not one of torch.jit: "
            f"{account(error)}"
        ) from error


def _detach_what_hooks_make(module: nn.Module) -> None:
    """Detach the tensors that hooks make of parameters before each call, as in weight_norm and prune.

    A tensor that was computed from parameters can't be copied. The next call makes it anew.
    """
    for part in module.modules():
        if part._forward_pre_hooks:
            for name, value in vars(part).items():
                if isinstance(value, Tensor) and not value.is_leaf:
                    vars(part)[name] = value.detach()


def under_seed(build: Callable[[], T], seed: int) -> T:
    """What ``build`` makes if torch, numpy and Python draw their numbers by ``seed``.

    Later draws are as if it had not been.
    """
    with seeded(seed), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def unrepeated(module: nn.Module, leaves: Tree) -> str | None:
    """The name of a tensor of the module that another building of it gave other values. None if there is none."""
    own = {**module.state_dict(), **dict(module.named_parameters()), **dict(module.named_buffers())}
    return next((name for name, leaf in leaves.items() if not _same(own[name], leaf)), None)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
