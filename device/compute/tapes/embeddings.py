"""Gradients of embeddings in a stack of devices on a GPU, with the same bits in every slot.

In a stack, the tables of all slots are one, and the rows that belong to all their tokens lie behind each other. Where
these are 3,072 rows or fewer, torch adds them up in chunks of 32: first the rows of a token within each chunk, and then
these sums. So the last bits depend on where the chunks begin. Here each slot gets whole chunks. More rows are sorted by
token first, and then it does not matter where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from torch import Tensor
from torch.nn import functional

GRADIENT: Final = "aten::embedding_dense_backward"
"""The name of the operator. It takes the gradients, the tokens, the number of rows of the table, and two settings."""
CHUNK: Final = 32
"""The number of rows that a GPU of NVIDIA adds up at once."""

Gradient = Callable[..., Tensor]


def in_whole_chunks(function: Gradient, args: Sequence[Any], slots: int) -> Gradient | None:
    """The gradient ``function`` with so many rows in each of ``slots`` that the next slot begins with a new chunk.

    ``args`` are its arguments, in which layouts stand for tensors. None if that is so anyway, or if it belongs to no
    slot, because all devices have the same tokens.
    """
    _, tokens, table, *_ = args
    if tokens.shape[:1] != (slots,) or table % slots or tokens.shape[1:].numel() % CHUNK == 0:
        return None
    return partial(_filled_up, function)


def _filled_up(function: Gradient, gradients: Tensor, tokens: Tensor, table: int, *settings: Any) -> Tensor:
    """The gradient, with rows of zeros in each slot for a token that the table does not have."""
    slots, rows = len(tokens), tokens[0].numel()
    more = -rows % CHUNK
    tokens = functional.pad(tokens.reshape(slots, rows), (0, more), value=table)
    gradients = functional.pad(gradients.reshape(slots, rows, gradients.shape[-1]), (0, 0, 0, more))
    return function(gradients, tokens, table + 1, *settings)[:table]
