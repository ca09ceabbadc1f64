"""Weight alignment (Lee et al., 2022, section 5.1): the class that each neuron of a model prefers, in two models.

The paper's table 2 is about the last two fully connected layers. Here they are ``features``, the input of the last
layer, after its activation function, and ``logits``, the output of the last layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface import Outputs
from fedemu.algorithms.measures.forgetting import agreement, preferred_classes

LAYERS = ("features", "logits")
"""The layers that are compared, by their names in ``Outputs``."""


class Preferences:
    """The mean activation of every neuron by class, collected while a model is tested."""

    def __init__(self, classes: int) -> None:
        self._counts = torch.zeros(classes, dtype=torch.float64)
        self._sums: dict[str, Tensor] = {}

    def watch(self, outputs: Outputs, labels: Tensor) -> None:
        """Add the outputs for a batch with ``labels [batch]``."""
        self._counts += torch.bincount(labels, minlength=len(self._counts))
        for layer in LAYERS:
            values = getattr(outputs, layer).flatten(1).double()
            if layer not in self._sums:
                self._sums[layer] = values.new_zeros(len(self._counts), values.shape[1])
            self._sums[layer].index_add_(0, labels, values)

    def of(self, layer: str) -> NDArray[np.int64]:
        """The class that each neuron of a layer prefers, ``[neurons]``."""
        return preferred_classes(self._sums[layer] / self._counts[:, None])


def alignment(
    before: Preferences, locals: Sequence[Preferences], after: Preferences, seen: Tensor | None = None
) -> dict[str, Any]:
    """The alignment of the old global model with the devices' models and with the new global one, by layer.

    ``alignment`` has it for each layer and model. ``local_alignment``, a mean over devices, and ``global_alignment``
    are those of the features. ``seen [classes]`` is above 0 for the classes that tasks had brought to the old model;
    the logits of others are no neurons yet, and do not count. None if classes do not come task by task.
    """
    by_layer: dict[str, dict[str, Any]] = {}
    for layer in LAYERS:
        counted = slice(None) if seen is None or layer != "logits" else seen.numpy() > 0
        old = before.of(layer)[counted]
        by_layer[layer] = {
            "locals": [agreement(old, each.of(layer)[counted]) for each in locals],
            "after": agreement(old, after.of(layer)[counted]),
        }
    features = by_layer["features"]
    return {
        "alignment": by_layer,
        "local_alignment": float(np.mean(features["locals"])),
        "global_alignment": features["after"],
    }
