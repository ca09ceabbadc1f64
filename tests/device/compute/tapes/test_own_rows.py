"""Operators with an index in a stack: none reaches the tensors of another device, and right ones stay what they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.device.compute.tapes.own_rows import OwnRows
from fedemu.device.compute.tapes.tracing import trace

SLOTS, ROWS, WIDTH = 3, 4, 2
TABLES = torch.arange(float(SLOTS * ROWS * WIDTH)).reshape(SLOTS, ROWS, WIDTH)
INDICES = torch.tensor([[3, 0], [1, 2], [0, 3]])

Operator = Callable[[Tensor, Tensor], Tensor]

JOINED: dict[str, Operator] = {
    "embedding": lambda table, index: functional.embedding(index, table),
    "embedding of torch": lambda table, index: torch.embedding(table, index),
    "embedding of aten": lambda table, index: torch.ops.aten.embedding(table, index),
    "embedding of aten by its overload": lambda table, index: torch.ops.aten.embedding.default(table, index),
    "embedding of each sample": lambda table, index: torch.func.vmap(lambda one: torch.embedding(table, one))(index),
    "index_fill": lambda table, index: table.index_fill(0, index, 9.0),
    "index_fill by a tensor": lambda table, index: torch.index_fill(table, 0, index, table.sum()),
    "index_fill of a later dimension": lambda table, index: table.T.index_fill(-1, index, 9),
    "index_fill in place": lambda table, index: table.clone().index_fill_(0, index, 9),
}
"""What ``OwnRows`` computes in another way. ``vmap`` alone joins the tables of all devices."""

APART: dict[str, Operator] = {
    "index": lambda table, index: table[index],
    "index_select": lambda table, index: table.index_select(0, index),
    "gather": lambda table, index: table[:, 0].gather(0, index),
    "take": lambda table, index: table[:, 0].take(index),
    "put": lambda table, index: table[:, 0].put(index, torch.ones(2)),
    "scatter": lambda table, index: table[:, 0].scatter(0, index, torch.ones(2)),
    "scatter_add": lambda table, index: table[:, 0].scatter_add(0, index, torch.ones(2)),
    "scatter_reduce": lambda table, index: table[:, 0].scatter_reduce(0, index, torch.ones(2), "amax"),
    "index_add": lambda table, index: table.index_add(0, index, torch.ones(2, WIDTH)),
    "index_copy": lambda table, index: table.index_copy(0, index, torch.ones(2, WIDTH)),
    "index_put": lambda table, index: table.index_put((index,), torch.ones(2, WIDTH)),
    "index_reduce": lambda table, index: table.index_reduce(0, index, torch.ones(2, WIDTH), "prod"),
    "embedding_bag": lambda table, index: functional.embedding_bag(index[None], table),
    "nll_loss": lambda table, index: functional.nll_loss(table.T, index),
    "cross_entropy": lambda table, index: functional.cross_entropy(table.T, index),
    "cross_entropy with weights": lambda table, index: functional.cross_entropy(table.T, index, torch.arange(4.0)),
    "multi_margin_loss": lambda table, index: functional.multi_margin_loss(table.T, index),
}
"""What ``vmap`` keeps apart by itself."""

FROM_THE_END = {name for name in JOINED if name.startswith("index_fill")} | {"index", "take", "put", "index_put"}
"""Those whose index may count from the end."""

both = pytest.mark.parametrize("operator", [*JOINED.values(), *APART.values()], ids=[*JOINED, *APART])


def mapped(operator: Operator) -> Operator:
    def within(table: Tensor, index: Tensor) -> Tensor:
        with OwnRows():
            return operator(table, index)

    return torch.func.vmap(within)


def with_one(index: int) -> Tensor:
    """The indices of all slots, with this one in the second slot."""
    return INDICES.index_put((torch.tensor(1), torch.tensor(0)), torch.tensor(index))


@both
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:index_reduce")
def test_within_its_own_tensor_each_device_has_what_it_has_alone(operator: Operator) -> None:
    alone = torch.stack([operator(table, index) for table, index in zip(TABLES, INDICES, strict=True)])
    assert torch.equal(mapped(operator)(TABLES, INDICES), alone)


@pytest.mark.parametrize("name", [*JOINED, *APART])
@pytest.mark.parametrize("beyond", [ROWS, -1, 2 * ROWS - 1, -ROWS, -ROWS - 1])
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:index_reduce")
def test_an_index_beyond_its_own_tensor_is_an_error_or_counts_from_the_end(name: str, beyond: int) -> None:
    operator = (JOINED | APART)[name]
    if name in FROM_THE_END and -ROWS <= beyond < 0:
        wrapped = mapped(operator)(TABLES, with_one(beyond + ROWS))
        assert torch.equal(mapped(operator)(TABLES, with_one(beyond)), wrapped)
    else:
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|not in the valid range"):
            mapped(operator)(TABLES, with_one(beyond))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_recorded_step_has_the_same_gradients_and_the_same_errors(dtype: torch.dtype) -> None:
    def loss(table: Tensor, index: Tensor) -> Tensor:
        return (functional.embedding(index, table, padding_idx=0).square() * 3).sum()

    def stacked(*args: Tensor) -> list[Tensor]:
        return [mapped(torch.func.grad(loss))(*args)]

    given: list[Any] = [TABLES, INDICES.to(dtype)]
    recorded = trace(stacked, given, slots=SLOTS)
    [gradients] = recorded(*given)
    assert torch.equal(gradients, torch.func.vmap(torch.func.grad(loss))(*given))
    for beyond in (ROWS, -1):
        with pytest.raises(IndexError, match="index out of range in self"):
            recorded(TABLES, with_one(beyond).to(dtype))
