"""The losses of the papers as pure functions of tensors: differentiable, usable under ``vmap``, means over a batch.

How local training puts them together is in ``objective.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedemu.algorithms.interface import Tree


def proximal(params: Tree, reference: Tree) -> Tensor:
    """Half the squared Euclidean distance of two models over the leaves of ``params``, zero-dimensional.

    The proximal term of FedProx (Li et al., 2020) without its coefficient.
    """
    distance = sum((leaf - reference[name]).square().sum() for name, leaf in params.items())
    return torch.as_tensor(distance) / 2
