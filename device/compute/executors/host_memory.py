"""Results on their way to host memory, in C order.

They leave inference mode there: an inference tensor could neither be written to nor take part in a gradient afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def in_host_memory(leaves: Sequence[Tensor], flat: bool | None = None) -> list[Tensor]:
    """Copies of tensors in host memory.

    If they lie elsewhere, those of one dtype come in one copy, as parts of one ``flat`` tensor: each copy from a GPU
    costs the same few microseconds, and waits for what the GPU has yet to do. From a GPU they come into pinned memory,
    which the driver needs not copy once more. A program may have made some of them in host memory.
    """
    with torch.inference_mode(False):
        if flat is None:
            flat = any(leaf.device.type != "cpu" for leaf in leaves)
        if not flat:
            return [_copied(leaf) for leaf in leaves]
        copied: dict[int, Tensor] = {}
        for kind in dict.fromkeys(map(_kind, leaves)):
            places = [place for place, leaf in enumerate(leaves) if _kind(leaf) == kind]
            whole = torch.cat([leaves[place].reshape(-1) for place in places])
            whole = torch.empty_like(whole, device="cpu", pin_memory=whole.is_cuda).copy_(whole)
            cut = torch.split(whole, [leaves[place].numel() for place in places])
            copied.update((place, part.view(leaves[place].shape)) for place, part in zip(places, cut, strict=True))
        return [copied[place] for place in range(len(leaves))]


def _kind(leaf: Tensor) -> tuple[torch.dtype, torch.device]:
    return leaf.dtype, leaf.device


def handed_over(leaves: Sequence[Tensor]) -> list[Tensor]:
    """As ``in_host_memory``, for tensors that nobody else has: those that lie there in C order keep their memory."""
    if any(leaf.device.type != "cpu" for leaf in leaves):
        return in_host_memory(leaves)
    with torch.inference_mode(False):
        return [_released(leaf) if _is_whole(leaf) else _copied(leaf) for leaf in leaves]


def _is_whole(leaf: Tensor) -> bool:
    return (
        leaf.is_contiguous()
        and leaf.nbytes == leaf.untyped_storage().nbytes()
        and not (leaf.is_conj() or leaf.is_neg())
    )


def _released(leaf: Tensor) -> Tensor:
    return torch.empty(0, dtype=leaf.dtype).set_(leaf.untyped_storage(), 0, leaf.shape, leaf.stride())


def _copied(leaf: Tensor) -> Tensor:
    return leaf.cpu().clone(memory_format=torch.contiguous_format)
