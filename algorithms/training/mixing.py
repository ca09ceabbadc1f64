"""Whether a model mixes the samples of a batch, so that samples that only fill up a batch change its training.

Buffers of a model are taken as a sign of it. A model of the user's own without buffers is asked by trying: it may, for
example, subtract the mean of the batch, take the samples for the steps of a sequence, divide by the number of samples,
or count in the backward pass how often the batch has a word.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from fedemu.algorithms.interface import Kind, Model, Outputs, Tree, mixes, pure
from fedemu.algorithms.models.frozen import frozen_of
from fedemu.algorithms.models.layer_statistics import observed
from fedemu.algorithms.models.randomness.draws import KEY_SHAPE, Draws
from fedemu.algorithms.models.randomness.random_functions import Keyed, has_keys, seeded_alike
from fedemu.algorithms.models.torch_module import under_seed
from fedemu.algorithms.training.compiler import without_compiler
from fedemu.algorithms.trees import map_leaves, only, without

_ROWS: Final = 4
_ROW: Final = 2
"""The sample that stays as it is while the others of its batch change. Some come before it and some after it."""
_ROUNDING: Final = 1e-3
"""The largest difference that is rounding, as a share of the largest number. In half precision it is more."""
_CHANGE: Final = 0.1
"""The standard deviation of what is added to variables. Some begin with zeros, which hide what they scale."""


def rows_matter(model: Model) -> bool:
    """Whether samples of weight 0 may change a training step of the model."""
    return bool(model.buffers) or mixes(model, train=True)


@dataclass(frozen=True, eq=False)
class OwnModel:
    """A model of the user's own, for samples of this shape, which tells by a trial whether it mixes them.

    What it draws in evaluation, by whichever generator, is the same each time. Whether it draws there at all is found
    out when it is first applied.

    With ``tokens`` samples are whole numbers that name something. A method of the user's own may use whatever else the
    ``inner`` model has.
    """

    inner: Model
    input_shape: tuple[int, ...]
    tokens: bool
    _quiet: set[bool] = field(default_factory=set, init=False, repr=False)
    """The modes, whether of training, in which the first application has drawn nothing without a key."""

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "_quiet"):  # a copy that is being made has none yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def kind(self) -> Kind:
        return self.inner.kind

    @property
    def buffers(self) -> frozenset[str]:
        return self.inner.buffers

    @property
    def frozen(self) -> Tree:
        return frozen_of(self.inner)

    def init(self, seed: int) -> Tree:
        return self.inner.init(seed)

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        if train in self._quiet or has_keys() or pure(self.inner):
            return self.inner.apply(variables, x, train)
        with seeded_alike(x.device) as drew:
            applied = self.inner.apply(variables, x, train)
            if not drew():
                self._quiet.add(train)
        return applied

    def observed(self) -> OwnModel:
        """The same model with ``Outputs.statistics``. Raises ConfigurationError if the inner model has none."""
        return replace(self, inner=observed(self.inner))

    def mixes(self, train: bool) -> bool:
        """Whether what it says of one sample depends on the other samples of the batch, or on their number.

        In training this is also how the variables would move by this sample alone. A single bit counts, but batches of
        other sizes may differ by rounding. False for a model that cannot be stacked. It is computed one by one, where
        no batch has to be filled up.
        """
        key = torch.zeros(KEY_SHAPE, dtype=torch.int32)
        drew = False

        def said(row: int, variables: Tree, key: Tensor, x: Tensor) -> tuple[Tensor, ...]:
            buffers = only(variables, self.buffers)

            def logits(trained: Tree) -> Tensor:
                nonlocal drew
                draws = Draws(key)
                with Keyed(draws):
                    outputs, _ = self.inner.apply({**trained, **buffers}, x, train)
                drew |= draws.count > 0
                return outputs.logits[row]

            def weighted(trained: Tree) -> tuple[Tensor, Tensor]:
                value = logits(trained)
                # The weights differ, because the sum of some outputs, such as softmax's, has no gradient.
                weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).reshape(value.shape)
                return (value * weights).sum(), value

            trained = without(variables, self.buffers)
            if not train:
                # Some layers, such as nn.LSTM, can be stacked only where they are differentiated too.
                return (torch.func.vjp(logits, trained)[0],)
            gradient, value = torch.func.grad(weighted, has_aux=True)(trained)
            return value, torch.cat([leaf.flatten() for leaf in gradient.values()])

        def stacked(variables: Tree, x: Tensor, row: int = _ROW) -> list[Tensor]:
            stack = map_leaves(lambda leaf: leaf.clone()[None], variables), key[None], x[None]
            with warnings.catch_warnings(), torch.no_grad(), without_compiler():
                warnings.filterwarnings("ignore", "There is a performance drop")
                found = under_seed(lambda: torch.func.vmap(partial(said, row))(*stack), 0)
            return [each.nan_to_num() for each in found]

        first = self.inner.init(0)
        x, other, changed = under_seed(lambda: (self._samples(), self._samples(), map_leaves(_changed, first)), 0)
        other[_ROW] = x[_ROW]
        try:
            for leaves in (first, changed):
                among = stacked(leaves, x)
                if not all(map(torch.equal, among, stacked(leaves, other))):
                    return True
            # What is drawn for a sample depends on the size of the batch, so a model that draws gets full ones anyway.
            return not drew and not all(map(_close, among, stacked(changed, x[_ROW : _ROW + 1], row=0)))
        except Exception:  # it cannot be stacked, or the training step will tell it better
            return False

    def _samples(self) -> Tensor:
        shape = (_ROWS, *self.input_shape)
        return torch.randint(0, 2, shape) if self.tokens else torch.randn(shape)


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, up to rounding of the size of their largest number."""
    share = max(_ROUNDING, torch.finfo(one.dtype).eps ** 0.5)
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=share * float(one.abs().max()))


def _changed(leaf: Tensor) -> Tensor:
    return leaf + _CHANGE * torch.randn(leaf.shape, dtype=leaf.dtype) if leaf.is_floating_point() else leaf
