"""The gradients of the losses of single samples: their inner products, their sums, and their products with a vector.

Let ``G [d, n]`` be the matrix whose columns are the gradients. Selection by the diversity of gradients needs only
``GᵀG``, ``G x`` and ``Gᵀ h`` (Good et al., "Coordinated Replay Sample Selection for Continual Federated Learning",
2023, section 4). With 2 million parameters and 1,000 samples ``G`` would take 8 GiB, so it is never made.

``GᵀG`` is a sum over the model's leaves. A linear layer that sees a sample once has the gradient ``δ aᵀ``. It is enough
to keep its input ``a`` and its output gradient ``δ``, because ``<δ aᵀ, ε bᵀ> = <δ, ε><a, b>``. For all other leaves the
gradients themselves are kept: at a time as many leaves, or columns of a leaf, as the memory holds. Each time takes one
more forward and backward pass. For pairs of samples only the products are computed. ``G x`` takes one backward pass,
and ``Gᵀ h`` one pass in forward mode.

The loss of a sample is the criterion on a batch of that sample alone. Batch normalisation uses its running statistics,
as in evaluation, because one sample has no other statistics. Nothing here imports torch's compiler, as
``torch.func.grad`` would.

In float32 the three results agree up to rounding, with one exception: they may round to different sides of a kink (a
ReLU at 0, or two equal values under max-pooling), and then find slightly different gradients for that sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.autograd import forward_ad

from fedemu.algorithms.interface import Batch, Facts, Model, Tree
from fedemu.algorithms.replay.inner_products import Columns, Kept, Part
from fedemu.algorithms.replay.linear_layers import LinearLayer, Watch
from fedemu.algorithms.replay.selection.candidates import Floats
from fedemu.algorithms.training.objective import Criterion
from fedemu.algorithms.trees import gradients_of, map_leaves, variables_of, without

_ROWS = 32
"""The number of samples in a forward pass. Larger batches do not fit into the processor's caches."""


@dataclass(frozen=True, eq=False)
class SampleGradients:
    """The gradients ``g_i`` of the criterion for each sample i of the batch, by all trained variables.

    ``batch.weight`` is not used. ``memory`` bounds, in bytes, what is kept of all samples together with the gradients
    of one block of samples, which has at least one. A few float64 matrices ``[n, n]`` and the forward and backward pass
    of 32 samples are not part of it. The model must run under ``torch.func.vmap`` and in forward mode.
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
        """The sum ``sum_i weights_i g_i`` over the trained leaves, as the gradient of the weighted loss."""
        factors = torch.as_tensor(np.asarray(weights, dtype=np.float64), device=self.batch.y.device)
        trained = without(self.variables, self.model.buffers)
        total = map_leaves(lambda leaf: torch.zeros_like(leaf, dtype=torch.float64), trained)
        for rows in self._blocks(_ROWS):
            inputs = variables_of(trained)
            logits = self._logits({**self.variables, **inputs}, rows)
            loss = (self._losses(logits, rows) * factors[rows]).sum()
            for name, slope in gradients_of(loss, inputs).items():
                total[name] += slope
        return map_leaves(lambda sums, leaf: sums.to(leaf.dtype), total, trained)

    def products(self, direction: Tree) -> Floats:
        """The products ``<direction, g_i>`` for every sample, ``[n]``, by the derivative of the logits along it."""
        products = [self._slopes_along(direction, rows) for rows in self._blocks(_ROWS)]
        return _floats(torch.cat(products)) if products else np.zeros(0)

    def _slopes_along(self, direction: Tree, rows: slice) -> Tensor:
        """The products ``<direction, g_i>`` of one block of samples, ``[rows]``."""
        trained = without(self.variables, self.model.buffers)
        with torch.no_grad(), forward_ad.dual_level():
            along = map_leaves(_dual, trained, direction)
            logits, change = forward_ad.unpack_dual(  # type: ignore[no-untyped-call]
                self._logits({**self.variables, **along}, rows)
            )
        if change is None:
            return torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
        # Forward mode ends at the logits. If it went through the criterion too, torch would import its compiler.
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            (slopes,) = torch.autograd.grad(self._losses(logits, rows).sum(), logits)
        products: Tensor = (slopes.double() * change.double()).flatten(1).sum(1)
        return products

    def _logits(self, variables: Tree, rows: slice) -> Tensor:
        return self.model.apply(variables, self.batch.x[rows], False)[0].logits

    def _losses(self, logits: Tensor, rows: slice) -> Tensor:
        """The losses ``[rows]``, each on a batch of one sample."""
        losses: Tensor = torch.func.vmap(self._loss)(logits, self.batch.x[rows], self.batch.y[rows])
        return losses

    def _loss(self, logits: Tensor, x: Tensor, y: Tensor) -> Tensor:
        alone = Batch(x[None], y[None], torch.ones(1, device=y.device))
        return self.criterion(logits[None], alone, self.facts)

    def _blocks(self, size: int) -> Iterator[slice]:
        return (slice(first, min(first + size, len(self))) for first in range(0, len(self), size))

    def _passes(self) -> Iterator[list[Part]]:
        """The parts to keep of all samples' gradients. Each list is as much as half of the memory holds at a time."""
        if not len(self):
            return
        trained = without(self.variables, self.model.buffers)
        bytes_each = max(leaf.element_size() for leaf in trained.values())
        room = max(1, self.memory // 2 // (len(self) * bytes_each))
        parts: list[Part] = []
        for part in self._parts(trained, room):
            if parts and sum(part.width for part in parts) + part.width > room:
                yield parts
                parts = []
            parts.append(part)
        if parts:
            yield parts

    def _parts(self, trained: Tree, room: int) -> Iterator[Part]:
        """All trained leaves in parts of at most ``room`` values per sample.

        A linear layer is one part, with its two factors, if these have fewer values. The others are columns of a
        gradient.
        """
        layers = self._linear_layers(trained)
        for name, leaf in trained.items():
            layer = layers.get(name)
            if layer is not None and layer.pays and layer.width <= room:
                yield layer
            else:
                yield from (Columns(name, k, min(k + room, leaf.numel())) for k in range(0, leaf.numel(), room))

    def _linear_layers(self, leaves: Tree) -> dict[str, LinearLayer]:
        """The leaves that are the weight of exactly one linear layer. They are found by watching a forward pass."""
        with torch.no_grad(), Watch(leaves) as watch:
            self.model.apply(self.variables, self.batch.x[:1], False)
        return {name: found[0] for name, found in watch.uses.items() if len(found) == 1 and found[0] is not None}

    def _add_products(self, parts: Sequence[Part], total: Tensor) -> None:
        """Add the products of the parts to ``total``, in place.

        What is kept for them is local to this call, so it is gone before the next pass.
        """
        for kept in self._keep(parts):
            total += kept.products(self.memory // 4)

    def _keep(self, parts: Sequence[Part]) -> list[Kept]:
        """The values of the parts for all samples."""
        leaves = {part.name: self.variables[part.name] for part in parts if isinstance(part, Columns)}
        values = sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())
        kept = [Kept(part, len(self)) for part in parts]
        # A quarter of the memory is for the gradients of one block, and another for those of the block before it, which
        # still exist then.
        for rows in self._blocks(max(1, min(_ROWS, self.memory // 4 // max(1, values)))):
            gradients, inputs = self._block(rows, leaves, [part for part in parts if isinstance(part, LinearLayer)])
            for one in kept:
                one.store(rows, gradients[one.part.name], inputs.get(one.part.name))
        return kept

    def _block(
        self, rows: slice, leaves: Tree, layers: Sequence[LinearLayer]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """The gradients ``[rows, ...]`` by leaves and by layers' outputs, and the layers' inputs ``[rows, ...]``."""
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
        return gradients_of(losses.sum(), {**own, **probes}), map_leaves(Tensor.detach, inputs)


def _dual(leaf: Tensor, direction: Tensor) -> Tensor:
    dual: Tensor = forward_ad.make_dual(leaf, direction.to(leaf))  # type: ignore[no-untyped-call]
    return dual


def _floats(values: Tensor) -> Floats:
    array: Floats = values.cpu().numpy()
    return array
