"""The gradients of the losses of single samples: their inner products, sums, and products with a vector.

Selection by the diversity of gradients needs no more of the matrix ``G [d, n]`` whose columns they are than ``GᵀG``,
``G x`` and ``Gᵀ h`` (Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning", section 4).
With 2 million parameters and 1,000 samples ``G`` would take 8 GiB; nothing here holds it.

``GᵀG`` is a sum over the model's leaves. A linear layer that sees a sample once has the gradient ``δ aᵀ``, of which it
is enough to keep input ``a`` and output gradient ``δ``, as ``<δ aᵀ, ε bᵀ> = <δ, ε><a, b>``. Of all other leaves the
gradients themselves are kept, as many leaves, or columns of a leaf, at a time as there is memory for; each time costs
one more forward and backward pass, and nothing is computed for pairs of samples but their products. ``G x`` is one
backward pass and ``Gᵀ h`` one in forward mode.

A loss is the criterion on a batch of that sample alone. Batch normalisation goes by its running statistics, as in
evaluation, since a sample alone has no others. None of this imports torch's compiler, as ``torch.func.grad`` would.

In float32 the three may round to different sides of a kink, a ReLU at 0 or two equal values under max-pooling, and then
find a slightly different gradient for that sample; otherwise they agree to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.autograd import forward_ad

from fedemu.algorithms.interface import Batch, Facts, Model, Tree
from fedemu.algorithms.replay.linear_layers import LinearLayer, Watch
from fedemu.algorithms.training.objective import Criterion
from fedemu.algorithms.trees import map_leaves, without

Floats = NDArray[np.float64]

_ROWS = 32
"""Samples per forward pass; larger batches leave the processor's caches."""
_COLUMNS = 2048
"""Values per sample that are multiplied at a time, as they become float64 for it."""


@dataclass(frozen=True, eq=False)
class SampleGradients:
    """``g_i``: the gradient of the criterion for sample i of the batch by all trained variables.

    ``batch.weight`` is not looked at. ``memory``, in bytes, bounds what is kept of all samples together with the
    gradients of blocks of them; a block has one sample at least. A few matrices ``[n, n]`` of float64 and the forward
    and backward pass of 32 samples come on top. The model has to run under ``torch.func.vmap`` and in forward mode.
    """

    model: Model
    criterion: Criterion
    variables: Tree
    batch: Batch
    facts: Facts
    memory: int = 2**29

    def __len__(self) -> int:
        return len(self.batch.y)

    @torch.enable_grad()
    def gram(self) -> Floats:
        """The inner products ``[n, n]`` of the gradients, symmetric, summed in float64."""
        total = torch.zeros(len(self), len(self), dtype=torch.float64, device=self.batch.y.device)
        for parts in self._passes():
            self._add_products(parts, total)
        return _floats((total + total.t()) / 2)

    @torch.enable_grad()
    def weighted_sum(self, weights: ArrayLike) -> dict[str, Tensor]:
        """``sum_i weights_i g_i`` over the trained leaves, by the gradient of the weighted loss."""
        factors = torch.as_tensor(np.asarray(weights, dtype=np.float64), device=self.batch.y.device)
        trained = without(self.variables, self.model.buffers)
        total = map_leaves(lambda leaf: torch.zeros_like(leaf, dtype=torch.float64), trained)
        for rows in self._blocks(_ROWS):
            inputs = map_leaves(lambda leaf: leaf.detach().requires_grad_(), trained)
            logits = self._logits({**self.variables, **inputs}, rows)
            loss = (self._losses(logits, rows) * factors[rows]).sum()
            slopes = torch.autograd.grad(loss, list(inputs.values()), materialize_grads=True)
            for sums, slope in zip(total.values(), slopes, strict=True):
                sums += slope
        return map_leaves(lambda sums, leaf: sums.to(leaf.dtype), total, trained)

    def products(self, direction: Tree) -> Floats:
        """``<direction, g_i>`` for every sample ``[n]``, by the derivative of the logits along ``direction``."""
        products = [self._slopes_along(direction, rows) for rows in self._blocks(_ROWS)]
        return _floats(torch.cat(products)) if products else np.zeros(0)

    def _slopes_along(self, direction: Tree, rows: slice) -> Tensor:
        trained = without(self.variables, self.model.buffers)
        with torch.no_grad(), forward_ad.dual_level():
            along = map_leaves(_dual, trained, direction)
            logits, change = forward_ad.unpack_dual(  # type: ignore[no-untyped-call]
                self._logits({**self.variables, **along}, rows)
            )
        if change is None:
            return torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
        # Forward mode ends at the logits: through the criterion too, torch would import its compiler.
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(self._losses(logits, rows).sum(), logits)
        products: Tensor = (slopes.double() * change.double()).flatten(1).sum(1)
        return products

    def _logits(self, variables: Tree, rows: slice) -> Tensor:
        return self.model.apply(variables, self.batch.x[rows], False)[0].logits

    def _losses(self, logits: Tensor, rows: slice) -> Tensor:
        """``[rows]``, each on a batch of its own."""
        losses: Tensor = torch.func.vmap(self._loss)(logits, self.batch.x[rows], self.batch.y[rows])
        return losses

    def _loss(self, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        alone = Batch(x[None], y[None], torch.ones(1, device=y.device))
        return self.criterion(logits[None], alone, self.facts)

    def _blocks(self, size: int) -> Iterator[slice]:
        return (slice(first, min(first + size, len(self))) for first in range(0, len(self), size))

    def _passes(self) -> Iterator[list[_Part]]:
        """What to keep of all samples, as much at a time as half of the memory holds."""
        if not len(self):
            return
        trained = without(self.variables, self.model.buffers)
        bytes_each = max(leaf.element_size() for leaf in trained.values())
        room = max(1, self.memory // 2 // (len(self) * bytes_each))
        parts: list[_Part] = []
        for part in self._parts(trained, room):
            if parts and sum(part.width for part in parts) + part.width > room:
                yield parts
                parts = []
            parts.append(part)
        if parts:
            yield parts

    def _parts(self, trained: Tree, room: int) -> Iterator[_Part]:
        """All trained leaves: as a layer's factors where these are less, else the gradient, ``room`` values at most."""
        layers = self._linear_layers(trained)
        for name, leaf in trained.items():
            layer = layers.get(name)
            if layer is not None and layer.pays and layer.width <= room:
                yield layer
            else:
                yield from (_Columns(name, k, min(k + room, leaf.numel())) for k in range(0, leaf.numel(), room))

    def _linear_layers(self, leaves: Tree) -> dict[str, LinearLayer]:
        """Leaves that are the weights of one linear layer each, found by watching a forward pass."""
        with torch.no_grad(), Watch(leaves) as watch:
            self.model.apply(self.variables, self.batch.x[:1], False)
        return {name: found[0] for name, found in watch.uses.items() if len(found) == 1 and found[0] is not None}

    def _add_products(self, parts: Sequence[_Part], total: Tensor) -> None:
        """To ``total``, in place; what was kept for it is let go before the next pass."""
        for kept in self._keep(parts):
            total += kept.products(self.memory // 4)

    def _keep(self, parts: Sequence[_Part]) -> list[_Kept]:
        """What the parts are, of all samples."""
        leaves = {part.name: self.variables[part.name] for part in parts if isinstance(part, _Columns)}
        values = sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())
        kept = [_Kept(part, len(self)) for part in parts]
        # A quarter each for the gradients of a block and of the one before, which are still there.
        for rows in self._blocks(max(1, min(_ROWS, self.memory // 4 // max(1, values)))):
            gradients, inputs = self._block(rows, leaves, [part for part in parts if isinstance(part, LinearLayer)])
            for one in kept:
                one.store(rows, gradients[one.part.name], inputs.get(one.part.name))
        return kept

    def _block(
        self, rows: slice, leaves: Tree, layers: Sequence[LinearLayer]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Gradients ``[rows, ...]`` by leaves and by the outputs of layers, and the inputs ``[rows, ...]`` of these."""
        x, y = self.batch.x[rows], self.batch.y[rows]
        # Every sample gets leaves of its own, so that their gradients are not summed over samples.
        own = map_leaves(lambda leaf: leaf.detach().expand(len(y), *leaf.shape).requires_grad_(), leaves)
        probes = {
            layer.name: self.variables[layer.name].new_zeros(len(y), *layer.output).requires_grad_() for layer in layers
        }

        def loss(own: Tree, probes: Tree, x: Tensor, y: Tensor) -> tuple[Tensor, Tree]:
            with Watch({name: self.variables[name] for name in probes}, probes) as watch:
                outputs, _ = self.model.apply({**self.variables, **own}, x[None], False)
            return self._loss(outputs.logits[0], x, y), watch.inputs

        losses, inputs = torch.func.vmap(loss)(own, probes, x, y)
        by = {**own, **probes}
        slopes = torch.autograd.grad(losses.sum(), list(by.values()), materialize_grads=True)
        return dict(zip(by, slopes, strict=True)), map_leaves(Tensor.detach, inputs)


@dataclass(frozen=True, eq=False)
class Directions:
    """``G``, whose columns are the gradients' directions ``g_i / ‖g_i‖``; that of a gradient of norm 0 is 0.

    ``gram [n, n]`` is ``GᵀG``, ``scales [n]`` holds ``1 / ‖g_i‖``, or 0.
    """

    gradients: SampleGradients
    gram: Floats
    scales: Floats

    @classmethod
    def of(cls, gradients: SampleGradients) -> Directions:
        gram = gradients.gram()
        norms = np.sqrt(np.diagonal(gram))
        scales = np.divide(1.0, norms, out=np.zeros_like(norms), where=norms != 0)
        return cls(gradients, gram * scales[:, None] * scales, scales)

    def weighted_sum(self, x: ArrayLike) -> dict[str, Tensor]:
        """``G x``, for ``x [n]``."""
        return self.gradients.weighted_sum(np.asarray(x, dtype=np.float64) * self.scales)

    def products(self, direction: Tree) -> Floats:
        """``Gᵀ h``, for ``h`` over the trained leaves."""
        return self.gradients.products(direction) * self.scales


class _Columns(NamedTuple):
    """Some values of a leaf's flat gradient."""

    name: str
    start: int
    stop: int

    @property
    def width(self) -> int:
        return self.stop - self.start


_Part = _Columns | LinearLayer


@dataclass(eq=False)
class _Kept:
    """A part's values of all samples: gradients ``[n, width]``, those of a layer by its output, with its inputs."""

    part: _Part
    samples: int
    gradients: Tensor | None = None
    inputs: Tensor | None = None

    def store(self, rows: slice, gradients: Tensor, inputs: Tensor | None) -> None:
        gradients = gradients.flatten(1)
        if isinstance(self.part, _Columns):
            gradients = gradients[:, self.part.start : self.part.stop]
        self.gradients = self._stored(self.gradients, rows, gradients)
        if inputs is not None:
            self.inputs = self._stored(self.inputs, rows, inputs.flatten(1))

    def products(self, memory: int) -> Tensor:
        """The contribution ``[n, n]`` to the inner products."""
        assert self.gradients is not None
        if not isinstance(self.part, LinearLayer):
            return _inner(self.gradients, self.gradients)
        assert self.inputs is not None
        positions = self.part.positions
        left, right = (part.view(self.samples, positions, -1) for part in (self.gradients, self.inputs))
        size = max(1, memory // (3 * 8 * positions**2 * self.samples))
        return torch.cat([_pairs(left, right, first, size) for first in range(0, self.samples, size)])

    def _stored(self, into: Tensor | None, rows: slice, values: Tensor) -> Tensor:
        if into is None:
            into = values.new_empty(self.samples, values.shape[1])
        into[rows] = values
        return into


def _pairs(gradients: Tensor, inputs: Tensor, first: int, size: int) -> Tensor:
    """``[size, n]``: the products of ``size`` samples' layer gradients with all, of ``[n, positions, ...]`` both."""
    by_gradients, by_inputs = (
        _inner(all[first : first + size].flatten(0, 1), all.flatten(0, 1)) for all in (gradients, inputs)
    )
    samples, positions = gradients.shape[:2]
    return by_gradients.mul_(by_inputs).view(-1, positions, samples, positions).sum((1, 3))


def _inner(left: Tensor, right: Tensor) -> Tensor:
    """The inner products ``[a, b]`` of rows of ``[a, width]`` and ``[b, width]``, in float64."""
    total = torch.zeros(len(left), len(right), dtype=torch.float64, device=left.device)
    for first in range(0, left.shape[1], _COLUMNS):
        columns = slice(first, first + _COLUMNS)
        total.addmm_(left[:, columns].double(), right[:, columns].double().t())
    return total


def _dual(leaf: Tensor, direction: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(leaf, direction.to(leaf))  # type: ignore[no-untyped-call]
    return dual


def _floats(values: Tensor) -> Floats:
    array: Floats = values.cpu().numpy()
    return array
