"""The reduction of the payloads of one ask into what the script receives: leaf by leaf, block by block, in float64.

Every element is folded on its own, ``((n_1 x_1) + n_2 x_2) + ...``, in the given order, by separate multiplications
and additions, then divided once. So the bits depend on the order of the payloads alone. They do not depend on the size
of the blocks, on the number of threads, or on whether the machine fuses multiply and add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedemu.algorithms.interface import Handle, Reducer
from fedemu.coordinator.asks.payload import Leaf, Payload, Subtree, as_tensor, widened

BLOCK = 16384
"""Elements per block. Accumulator, scratch and input are 320 KiB together, which stays in a core's second-level cache.
Blocks of 8 Ki elements cost more in calls, and those of 64 Ki cost more in cache misses."""


def reduce_replies(
    reducers: Mapping[str, Reducer], payloads: Sequence[Payload], examples: Sequence[int], block: int = BLOCK
) -> dict[str, Any]:
    """For each key of ``reducers`` one Tree, or a list of Handles if it is ``collect``.

    ``payloads`` are in cohort order, and ``examples`` are their numbers of examples. If nobody has examples,
    ``weighted_mean`` is the even mean. Results have the leaf's dtype. For integers, a mean is rounded half to even, and
    a total is exact in 64 bits and saturates at the limits of the dtype. A bool counts as 0 or 1: a mean is the
    majority, a total says whether any was true. Raises ValueError if there are no payloads, or no tensors for a key.
    """
    if not payloads or len(payloads) != len(examples):
        raise ValueError(f"{len(payloads)} payloads and {len(examples)} numbers of examples cannot be reduced")
    result: dict[str, Any] = {}
    loaded = [payload.load() for payload in payloads]
    for key, reducer in reducers.items():
        sent = reducer.key or key
        prefix = f"{sent}/"
        names = [name for name in payloads[0].leaves if name.startswith(prefix)]
        if not names:
            raise ValueError(f"the replies have no tensors under the key {sent!r} that is to be reduced")
        if reducer.kind == "collect":
            handles: list[Handle] = [Subtree(payload, sent) for payload in payloads]
            result[key] = handles
            continue
        weights, divisor = _weights(reducer, examples)
        tree: dict[str, Tensor] = {}
        for name in names:
            leaf = payloads[0].leaves[name]
            values = [arrays[name].reshape(-1) for arrays in loaded]
            tree[name.removeprefix(prefix)] = _fold(leaf, values, weights, divisor, block)
        result[key] = tree
    return result


def _weights(reducer: Reducer, examples: Sequence[int]) -> tuple[Sequence[int], int | None]:
    """The weights and the divisor of the sum. Weights are whole, so products with float32 are exact in float64."""
    if reducer.kind == "weighted_mean" and sum(examples) > 0:
        return examples, sum(examples)
    return [1] * len(examples), None if reducer.kind == "total" else len(examples)


def _fold(
    leaf: Leaf, values: Sequence[NDArray[Any]], weights: Sequence[int], divisor: int | None, block: int
) -> Tensor:
    whole = "float" not in leaf.dtype
    if whole and divisor is None:
        return _exact_total(leaf, values)
    narrow = np.dtype(np.float32) if leaf.dtype == "bfloat16" else values[0].dtype.newbyteorder("=")
    out = np.empty(leaf.size, narrow)
    sums, scratch = np.empty(min(block, leaf.size)), np.empty(min(block, leaf.size))
    for start in range(0, leaf.size, block):
        stop = min(start + block, leaf.size)
        total, product = sums[: stop - start], scratch[: stop - start]
        for place, (array, weight) in enumerate(zip(values, weights, strict=True)):
            part = widened(array[start:stop]) if leaf.dtype == "bfloat16" else array[start:stop]
            if place > 0 and weight == 1:
                np.add(total, part, out=total)
                continue
            # The copy comes first, because numpy multiplies a float32 array by a Python number in float32.
            term = product if place else total
            np.copyto(term, part)
            np.multiply(term, weight, out=term)
            if place:
                np.add(total, product, out=total)
        if divisor is not None and divisor != 1:
            np.divide(total, divisor, out=total)
        if whole:
            _into_integers(np.rint(total, out=total), out[start:stop])
        else:
            with np.errstate(over="ignore"):  # a sum beyond the dtype is infinite, as anywhere else
                np.copyto(out[start:stop], total, casting="same_kind")
    folded = torch.from_numpy(out).reshape(leaf.shape)
    return folded.to(torch.bfloat16) if leaf.dtype == "bfloat16" else folded


def _into_integers(rounded: NDArray[np.float64], out: NDArray[Any]) -> None:
    """Store rounded means. They fit into the dtype, but the largest int64 values round up to 2**63 in float64."""
    if out.dtype == np.int64:
        np.minimum(rounded, np.nextafter(2.0**63, 0.0), out=rounded)
    np.copyto(out, rounded, casting="unsafe")


def _exact_total(leaf: Leaf, values: Sequence[NDArray[Any]]) -> Tensor:
    if leaf.dtype == "bool":
        return as_tensor(np.logical_or.reduce(values).reshape(leaf.shape), leaf)
    limits = np.iinfo(values[0].dtype)
    total = np.zeros(leaf.size, np.int64)
    for array in values:
        before = total
        total = before + array
        # Both terms have one sign and the sum has the other: 64 bits were too few.
        wrapped = ((before ^ total) & (array.astype(np.int64) ^ total)) < 0
        total = np.where(wrapped, np.where(before < 0, np.iinfo(np.int64).min, np.iinfo(np.int64).max), total)
    clipped = np.clip(total, limits.min, limits.max).astype(values[0].dtype)
    return as_tensor(clipped.reshape(leaf.shape), leaf)
