"""How tensors lie in memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory.

    ``conjugate`` and ``negative`` say whether its numbers are to be read as conjugates, or as negatives: some views
    differ in nothing else.
    """

    conjugate: bool
    negative: bool
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Layout:
        return Layout(tensor.is_conj(), tensor.is_neg(), tensor.shape, tensor.stride(), tensor.dtype)

    def blank(self) -> Tensor:
        """A tensor without values that lies so."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device="meta")


def laid_out(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of the tensor with these strides. They must give each element a place of its own."""
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def channels_last(tensor: Tensor) -> Tensor:
    """Images and kernels with their channels last in memory, for which convolutions take a third less time on a CPU."""
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def address(tensor: Tensor) -> int:
    """A number that names the memory of a tensor, and of all others that may overlap with it while they are alive."""
    return tensor.untyped_storage().data_ptr() or -id(tensor)


def geometry(tensor: Tensor) -> Hashable:
    """Two tensors that are alive and have the same geometry are the same numbers, as long as nothing writes to them."""
    return (address(tensor), tensor.storage_offset(), Layout.of(tensor)) if tensor.numel() else id(tensor)
