"""How programs run by torch's ordinary means, for models that ``torch.func`` cannot differentiate.

Gradients come from ``torch.autograd``, and what draws by itself, in Python, numpy or torch, draws by the key of the
step. It is the slowest way, and does whatever an ordinary training loop does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from fedemu.algorithms.models.randomness.generators import all_seeded, generators_for
from fedemu.algorithms.models.randomness.private_functions import inside_transform, keeping_activations
from fedemu.device.compute.tapes.private_torch import tree_flatten, tree_map_only, tree_unflatten


def drawing_by(key: Tensor) -> AbstractContextManager[None]:
    """Seed all generators, of Python, numpy and torch, by ``key`` ``[2]``, int32. At the end they are as before."""
    first, second = (int(word) % 2**32 for word in key.cpu())
    seed = first << 32 | second
    return all_seeded(seed, generators_for(key.device), torch_seed=seed >> 1)


@contextmanager
def plain(key: Tensor) -> Iterator[None]:
    """Let ``torch.func.grad`` differentiate by ``torch.autograd``, and all generators draw by ``key``."""
    with drawing_by(key), keeping_activations():
        original = torch.func.grad
        torch.func.grad = _grad_in_place_of(original)
        try:
            yield
        finally:
            torch.func.grad = original


def _grad_in_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
    depth = 0

    def grad(function: Callable[..., Any], argnums: Any = 0, has_aux: bool = False) -> Callable[..., Any]:
        def gradients(*arguments: Any, **keywords: Any) -> Any:
            if inside_transform() or not isinstance(argnums, int):
                return original(function, argnums, has_aux)(*arguments, **keywords)
            nonlocal depth
            leaves, spec = tree_flatten(arguments[argnums])
            # The gradient of a gradient needs the way back to the outer variables, which the function may also know
            # without being given them.
            nested = depth > 0 or any(leaf.requires_grad for leaf in leaves)
            with torch.enable_grad():
                taken = [
                    leaf.view_as(leaf) if leaf.requires_grad else leaf.detach().requires_grad_() for leaf in leaves
                ]
                given = [*arguments]
                given[argnums] = tree_unflatten(taken, spec)
                depth += 1
                try:
                    found = function(*given, **keywords)
                finally:
                    depth -= 1
                value, aux = found if has_aux else (found, None)
                slopes = [torch.zeros_like(leaf) for leaf in leaves]
                if value.requires_grad:
                    slopes = [*torch.autograd.grad(value, taken, create_graph=nested, materialize_grads=True)]
                for leaf, own in zip(leaves, taken, strict=True):
                    if not own.is_set_to(leaf):
                        # By ``own.data = ...`` it has other memory now. A step goes on from these values.
                        leaf.detach().copy_(own.detach())
            tree = tree_unflatten(slopes, spec)
            if not has_aux:
                return tree
            return tree, aux if nested else tree_map_only(Tensor, Tensor.detach, aux)

        return gradients

    return grad


@contextmanager
def looping() -> Iterator[None]:
    """Let ``torch.func.vmap`` call a function that it cannot map once for each row, and stack the results."""
    original = torch.func.vmap
    torch.func.vmap = _vmap_in_place_of(original)
    try:
        yield
    finally:
        torch.func.vmap = original


def _vmap_in_place_of(original: Callable[..., Any]) -> Callable[..., Any]:
    def vmap(function: Callable[..., Any], *settings: Any, **keywords: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            try:
                return original(function, *settings, **keywords)(*arguments)
            except RuntimeError:
                leaves, spec = tree_flatten(arguments)
                if settings or keywords or not len(leaves[0]):
                    raise
            rows = [
                tree_flatten(function(*tree_unflatten([leaf[row] for leaf in leaves], spec)))
                for row in range(len(leaves[0]))
            ]
            return tree_unflatten(
                [torch.stack(column) for column in zip(*(row for row, _ in rows), strict=True)], rows[0][1]
            )

        return run

    return vmap
