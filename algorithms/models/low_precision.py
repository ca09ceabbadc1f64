"""Any model with its expensive layers in bfloat16, for training that is faster and less exact.

Variables, their gradients and the optimiser stay float32. Convolutions, linear layers and other products of matrices
round their inputs and their results to bfloat16, which keeps 8 bits of the 24 of a float32. Losses get float32 outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
from torch import Tensor

from fedemu.algorithms.interface import Model, Outputs, Tree
from fedemu.algorithms.models.around import ModelAround
from fedemu.algorithms.models.growing import Growing
from fedemu.algorithms.models.layer_statistics import observed
from fedemu.algorithms.trees import map_leaves

Precision = Literal["float32", "tf32", "bfloat16"]
"""The values of ``local.precision`` in an experiment. ``tf32`` is a mode of GPUs, which the trainer turns on."""
_DTYPES: Final = {"bfloat16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class LowPrecision(ModelAround):
    """The model ``model``, applied under torch's autocast to ``dtype``. The outputs are float32."""

    model: Model
    dtype: torch.dtype

    def apply(self, variables: Tree, x: Tensor, train: bool) -> tuple[Outputs, Tree]:
        # The cache of casts is off: it would keep tensors of one trace alive for the next.
        with torch.autocast(x.device.type, self.dtype, cache_enabled=False):
            outputs, buffers = self.model.apply(variables, x, train)
        statistics, logits = map_leaves(Tensor.float, outputs.statistics), outputs.logits.float()
        # A model without features has its logits in their place, which is seen by their identity.
        features = logits if outputs.features is outputs.logits else outputs.features.float()
        return Outputs(logits, features, statistics), buffers

    def observed(self) -> LowPrecision:
        """The same model with ``Outputs.statistics``. Raises ConfigurationError if the inner model has none."""
        return replace(self, model=observed(self.model))


def precision_of(model: Model) -> Precision:
    """The precision in which the model's products are made, that of ``with_precision``."""
    if isinstance(model, Growing):
        return precision_of(model.model)
    return "bfloat16" if isinstance(model, LowPrecision) else "float32"


def with_precision(model: Model, precision: Precision) -> Model:
    """The model for training with ``precision``. A ``Growing`` model stays one; its classifier stays float32."""
    if precision not in _DTYPES:
        return model
    if isinstance(model, Growing):
        return replace(model, model=with_precision(model.model, precision))
    return LowPrecision(model, _DTYPES[precision])
