"""Gradients of embeddings on a GPU: equal devices have equal bits in all slots, and gradients stay what they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.layouts import Layout
from fedemu.device.compute.tapes.alike import alike, all_alike
from fedemu.device.compute.tapes.tape import mapped
from fedemu.device.compute.tapes.tracing import trace

GRADIENT = torch.ops.aten.embedding_dense_backward.default
SLOTS, LENGTH, WORDS, WIDTH = 5, 24, 4, 3


def in_chunks(gradients: Tensor, tokens: Tensor, words: int, padding: int, by_frequency: bool) -> Tensor:
    """The gradient as a GPU computes it for at most 3,072 rows: it adds the sums of chunks of 32 rows."""
    assert not by_frequency
    made = torch.zeros(words, gradients.shape[-1])
    for rows, of in zip(gradients.flatten(0, -2).split(32), tokens.flatten().split(32), strict=True):
        sums: dict[int, Tensor] = {}
        for row, token in zip(rows, of.tolist(), strict=True):
            sums[token] = sums[token] + row if token in sums else row
        for token, total in sums.items():
            if token != padding:
                made[token] += total
    return made


def found(function: Any, *args: Any, device: str = "cuda", slots: int = SLOTS) -> Any:
    layouts = mapped(Tensor, Layout.of, args)
    result = Layout.of(torch.zeros(args[2], args[0].shape[-1]))
    return alike(GRADIENT, function, layouts, {}, [result], torch.device(device), slots)


def device(samples: int) -> tuple[Tensor, Tensor]:
    """The gradients and the tokens of one device."""
    draws = torch.Generator().manual_seed(0)
    tokens = torch.randint(WORDS, (samples, LENGTH), generator=draws)
    return torch.randn((samples, LENGTH, WIDTH), generator=draws), tokens


def test_equal_devices_have_equal_bits_in_all_slots_and_alone() -> None:
    gradients, tokens = device(samples=10)
    stacked = tokens + WORDS * torch.arange(SLOTS)[:, None, None]
    args = gradients.expand(SLOTS, *gradients.shape), stacked, SLOTS * WORDS, -1, False
    alone = in_chunks(gradients, tokens, WORDS, -1, False)
    plain = in_chunks(*args).reshape(SLOTS, WORDS, WIDTH)
    assert torch.equal(plain[0], alone)
    assert not all(torch.equal(each, alone) for each in plain), "the chunks of other slots begin elsewhere"
    made = found(in_chunks, *args)(*args)
    assert made.shape == (SLOTS * WORDS, WIDTH)
    assert all(torch.equal(each, alone) for each in made.reshape(SLOTS, WORDS, WIDTH))


@pytest.mark.parametrize("padding", [-1, 2])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("samples", [None, 3])
def test_the_gradient_is_what_torch_computes(padding: int, by_frequency: bool, samples: int | None) -> None:
    draws = torch.Generator().manual_seed(0)
    shape = (SLOTS,) if samples is None else (SLOTS, samples, LENGTH)
    tokens = torch.randint(SLOTS * WORDS, shape, generator=draws)
    gradients = torch.randint(-9, 9, (*shape, WIDTH), generator=draws).float()
    args = gradients, tokens, SLOTS * WORDS, padding, by_frequency
    assert torch.equal(found(GRADIENT, *args)(*args), GRADIENT(*args))


def test_what_lies_in_whole_chunks_belongs_to_no_slot_or_is_computed_elsewhere_stays_as_it_is() -> None:
    def args(*shape: int, words: int = SLOTS * WORDS) -> tuple[Any, ...]:
        return torch.zeros(*shape, WIDTH), torch.zeros(shape, dtype=torch.int64), words, -1, False

    assert found(in_chunks, *args(SLOTS, 10, LENGTH)) is not None
    assert found(in_chunks, *args(SLOTS, 4, LENGTH)) is None
    assert found(in_chunks, *args(SLOTS, 0, LENGTH)) is None
    assert found(in_chunks, *args(10, LENGTH)) is None
    assert found(in_chunks, *args(SLOTS, LENGTH, words=SLOTS * WORDS + 1)) is None
    assert found(in_chunks, *args(SLOTS, 10, LENGTH), device="cpu") is None


@pytest.mark.gpu
def test_equal_devices_have_equal_bits_on_a_gpu_recorded_and_not() -> None:
    def loss(table: Tensor, tokens: Tensor, factors: Tensor) -> Tensor:
        return (functional.embedding(tokens, table) * factors).sum()

    def stacked(*args: Tensor) -> list[Tensor]:
        return [torch.func.vmap(torch.func.grad(loss))(*args)]

    factors, tokens = device(samples=10)
    given = [
        leaf.cuda().expand(SLOTS, *leaf.shape).contiguous() for leaf in (torch.zeros(WORDS, WIDTH), tokens, factors)
    ]
    (recorded,) = trace(stacked, given, slots=SLOTS)(*given)
    with all_alike(SLOTS):
        (computed,) = stacked(*given)
    expected = GRADIENT(factors, tokens, WORDS, -1, False)
    assert torch.allclose(recorded[0].cpu(), expected, atol=1e-4)
    assert torch.equal(recorded, computed)
    assert all(torch.equal(each, recorded[0]) for each in recorded)
