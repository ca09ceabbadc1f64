"""Layers that torch computes in one piece, changed so that their dropout draws by a key, and that they can be stacked.

Attention is written out even without dropout: torch would choose among several implementations, some of which can be
neither mapped over devices nor repeated to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.models.randomness.draws import Draws
from fedemu.algorithms.models.randomness.private_functions import inside_vmap

_HALVES: Final = (torch.float16, torch.bfloat16)


def attention(
    draws: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``softmax(Q·Kᵀ·scale + mask)·V``, with the arguments of ``scaled_dot_product_attention``.

    A query that may look at nothing gets zeros.
    """
    if enable_gqa:
        key, value = (part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) for part in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is None:
        weights = scores.softmax(-1)
    else:
        scores = torch.where(attn_mask, scores, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        blind = (scores == -torch.inf).all(-1, keepdim=True)
        weights = torch.where(blind, 0, torch.where(blind, 0, scores).softmax(-1))
    return (weights * draws.kept(weights, dropout_p) if dropout_p else weights) @ value


def _layered(function: Callable[..., Any], states: int) -> Callable[..., Any]:
    """A recurrent function of several layers with ``states`` states, layer by layer, with dropout between them."""

    def run(draws: Draws, *arguments: Any) -> Any:
        packed = isinstance(arguments[3], Sequence)
        lead, rest = arguments[: 2 if packed else 1], list(arguments[2 if packed else 1 :])
        hidden, weights, biases, layers, dropout, train, both, *order = rest
        if not (train and dropout and layers > 1):
            return function(*arguments)
        hidden = list(hidden) if states > 1 else [hidden]
        ways = 2 if both else 1
        each = len(weights) // layers
        x, ends = lead[0], []
        for layer in range(layers):
            begin = [state[layer * ways : (layer + 1) * ways] for state in hidden]
            own = list(weights[layer * each : (layer + 1) * each])
            given = begin if states > 1 else begin[0]
            x, *end = function(x, *lead[1:], given, own, biases, 1, 0.0, train, both, *order)
            ends.append(end)
            if layer + 1 < layers:
                x = x * draws.kept(x, dropout)
        return (x, *(torch.cat(parts) for parts in zip(*ends, strict=True)))

    return run


def _normalised(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A normalisation that computes half precision in float32 where it is mapped with variables of float32.

    torch does so by itself where it is not mapped, but cannot map it.
    """

    def run(draws: Draws, input: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        exact = any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.float32 for leaf in (*arguments, *keywords.values())
        )
        if input.dtype not in _HALVES or not exact or not inside_vmap():
            return function(input, *arguments, **keywords)
        return function(input.float(), *arguments, **keywords).to(input.dtype)

    return run


def _layer_norm(draws: Draws, input: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    # A GPU's autocast computes it in float32 by itself, and leaves the result so.
    function = torch.layer_norm if input.is_cuda else partial(_normalised(torch.layer_norm), draws)
    return function(input, *arguments, **keywords)


LAYERS: Final[dict[Any, Callable[..., Any]]] = {
    functional.scaled_dot_product_attention: attention,
    torch.lstm: _layered(torch.lstm, 2),
    torch.gru: _layered(torch.gru, 1),
    torch.rnn_tanh: _layered(torch.rnn_tanh, 1),
    torch.rnn_relu: _layered(torch.rnn_relu, 1),
    torch.batch_norm: _normalised(torch.batch_norm),
    torch.instance_norm: _normalised(torch.instance_norm),
    torch.layer_norm: _layer_norm,
}
"""What stands for each function of torch."""
