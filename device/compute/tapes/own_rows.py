"""Operators with an index, each device of a stack within its own tensors.

``torch.func.vmap`` joins the tensors of all devices into one for some operators, and adds to each index where its
device begins. An index beyond a device's own tensor then reads or writes that of the next device, and no error is
raised. Here such operators are as they are for a device alone. Of torch's operators that vmap maps, these are
``embedding`` and ``index_fill``. The others, such as ``gather``, ``index_select`` and ``nll_loss``, keep the dimension
of the devices apart, and raise an error by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class OwnRows(TorchFunctionMode):
    """A context in which an index beyond the tensor of a mapped device is an error, as it is without ``vmap``.

    On a processor it is an IndexError. On a GPU no value can be read within a step; there an assertion of the kernel
    fails, which ends the process, also for a device alone.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


def _embedding(weight: Tensor, indices: Tensor, *settings: Any, **named: Any) -> Tensor:
    return torch.embedding(weight, _looked_up(indices, weight), *settings, **named)


def _embedding_of_layers(input: Tensor, weight: Tensor, *settings: Any, **named: Any) -> Tensor:
    return functional.embedding(_looked_up(input, weight), weight, *settings, **named)


def _looked_up(indices: Tensor, weight: Tensor) -> Tensor:
    """The indices, as found in a table whose rows hold their own numbers.

    All devices share this table. So vmap joins nothing, and the operator raises its error.
    """
    numbers = torch.arange(len(weight), dtype=indices.dtype, device=indices.device)
    return torch.embedding(numbers[:, None], indices).squeeze(-1)


def _index_fill(input: Tensor, dim: int, index: Tensor, value: Tensor | float) -> Tensor:
    """``index_put``, by which vmap joins nothing. Its index may also count from the end."""
    values = torch.as_tensor(value, dtype=input.dtype, device=input.device)
    return input.movedim(dim, 0).index_put((index,), values).movedim(0, dim)


def _index_fill_(input: Tensor, dim: int, index: Tensor, value: Tensor | float) -> Tensor:
    return input.copy_(_index_fill(input, dim, index, value))


_INSTEAD: Final[dict[Any, Callable[..., Tensor]]] = {
    functional.embedding: _embedding_of_layers,
    torch.embedding: _embedding,
    torch.ops.aten.embedding: _embedding,
    torch.ops.aten.embedding.default: _embedding,
    torch.index_fill: _index_fill,
    Tensor.index_fill: _index_fill,
    Tensor.index_fill_: _index_fill_,
}
"""What stands for each operator that vmap joins."""
