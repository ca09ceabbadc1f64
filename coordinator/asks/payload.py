"""The payload of one reply: its form, the checks that it has to pass, and where it is kept until it is reduced."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.interface import Forest
from fedemu.coordinator.sums.leaf import Leaf, widened
from fedemu.protocol.codec import Buffer
from fedemu.protocol.errors import ConfigurationError, FedemuError, ProtocolError
from fedemu.protocol.host.files import refusal_of, write_at
from fedemu.protocol.host.mapping import aligned, mapped
from fedemu.protocol.ids import DeviceId
from fedemu.protocol.messages import TensorSpec
from fedemu.protocol.tensors import DTYPES, view

FILE_THRESHOLD = 1 << 20
"""A payload of more bytes than this is checked apart from the event loop. If it is kept for long, it is in a file."""

_BLOCK = 8192
"""Elements per block of the check. A block in float64 stays in the first cache levels, and is so small that no BLAS
splits its dot product among threads."""


class PayloadError(ProtocolError):
    """A payload that must not be used.

    ``reason`` is ``names``, ``dtype``, ``shape``, ``nonfinite``, ``norm``, ``examples`` or ``label_counts``.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class PayloadTemplate:
    """The tensors that a program promises to send, by wire name ``key/leaf``."""

    leaves: Mapping[str, Leaf]

    @property
    def bytes(self) -> int:
        """The size of all tensors in bytes."""
        return self.bytes_without(())

    def bytes_without(self, keys: Collection[str]) -> int:
        """The size in bytes of all tensors but those under the payload's ``keys``."""
        return sum(leaf.bytes for name, leaf in self.leaves.items() if name.partition("/")[0] not in keys)

    def require_at_most(self, size: int, program: str) -> None:
        """Raise ConfigurationError if a reply to this program has more bytes than ``size``."""
        if self.bytes > size:
            raise ConfigurationError(
                f"a reply to {program!r} has {self.bytes} bytes, more than limits.max_payload_bytes = {size}; "
                "raise the limit"
            )

    @classmethod
    def of(cls, forest: Forest) -> PayloadTemplate:
        """The template with a forest's names, dtypes and shapes. ``told_payload`` finds dtypes that cannot travel."""
        return cls(
            {
                f"{key}/{name}": Leaf(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for key, tree in forest.items()
                for name, tensor in tree.items()
            }
        )


def check(
    specs: tuple[TensorSpec, ...], frames: Sequence[memoryview], template: PayloadTemplate, max_norm: float
) -> None:
    """Raise PayloadError unless the tensors are exactly those of the template, finite, and within ``max_norm``.

    The norm is the Euclidean norm over all floating-point leaves together. Integers do not count.
    """
    _check_names(specs, template)
    if len(frames) != len(specs):
        raise PayloadError("shape", f"{len(frames)} buffers came with {len(specs)} tensors")
    floats: list[tuple[str, str, NDArray[Any]]] = []
    for spec, frame in zip(specs, frames, strict=True):
        leaf = template.leaves[spec.name]
        if spec.dtype != leaf.dtype:
            raise PayloadError("dtype", f"{spec.name} is {spec.dtype} where {leaf.dtype} was asked for")
        if spec.shape != leaf.shape:
            raise PayloadError("shape", f"{spec.name} has the shape {spec.shape} where {leaf.shape} was asked for")
        if frame.nbytes != leaf.bytes:
            raise PayloadError("shape", f"{spec.name} has {frame.nbytes} bytes where {leaf.shape} needs {leaf.bytes}")
        if leaf.dtype == "bool":
            if np.any(np.frombuffer(frame, np.uint8) > 1):
                raise PayloadError("dtype", f"{spec.name} is bool and has bytes other than 0 and 1")
        elif "float" in leaf.dtype:
            floats.append((spec.name, leaf.dtype, np.frombuffer(frame, DTYPES[leaf.dtype])))
    with np.errstate(over="ignore"):
        norm = math.sqrt(sum(_sum_of_squares(*leaf) for leaf in floats))
    if norm > max_norm:
        raise PayloadError("norm", f"the payload's norm {norm:.6g} exceeds {max_norm:.6g}")


class Payload:
    """The tensors of an accepted reply, in memory of the coordinator. Arrays stay valid after ``discard``."""

    def __init__(self, device: DeviceId, leaves: Mapping[str, Leaf], buffers: Mapping[str, Buffer]) -> None:
        """``buffers`` are those of the leaves, by wire name. They must not change any more."""
        self.device = device
        self.leaves = leaves
        self._buffers: Mapping[str, Buffer] | None = buffers

    @classmethod
    def of(cls, device: int, specs: Sequence[TensorSpec], frames: Sequence[Buffer]) -> Payload:
        """A checked payload in the buffers with which it came."""
        leaves = {spec.name: Leaf(spec.dtype, spec.shape) for spec in specs}
        return cls(DeviceId(device), leaves, dict(zip(leaves, frames, strict=True)))

    def load(self) -> dict[str, NDArray[Any]]:
        """Read-only arrays over the payload's memory, by wire name. A bfloat16 leaf is the uint16 of its bits."""
        if self._buffers is None:
            raise ValueError(f"the payload of device {self.device} was discarded")
        return {name: view(self._buffers[name], leaf.dtype, leaf.shape) for name, leaf in self.leaves.items()}

    def discard(self) -> None:
        """Free the memory or the mapped file. A second call does nothing."""
        self._buffers = None


def spill(directory: Path, device: int, specs: Sequence[TensorSpec], frames: Sequence[Buffer]) -> Payload:
    """Copy a checked payload that is kept for long: a small one into memory, a large one into a mapped file.

    The file is in ``directory`` and has no name there. So its disk space is free again as soon as nobody maps it,
    however and whenever the process ends. Raises FedemuError if the disk is full.
    """
    came = Payload.of(device, specs, frames)
    parts = [memoryview(frame).cast("B") for frame in frames]
    offsets, size = aligned(map(len, parts))
    if size <= FILE_THRESHOLD:
        memory = memoryview(bytearray(size))
        for part, offset in zip(parts, offsets, strict=True):
            memory[offset : offset + len(part)] = part
    else:
        memory = _mapped(directory, size, parts, offsets)
    kept = [memory[offset : offset + len(part)] for part, offset in zip(parts, offsets, strict=True)]
    return Payload(came.device, came.leaves, dict(zip(came.leaves, kept, strict=True)))


def _check_names(specs: tuple[TensorSpec, ...], template: PayloadTemplate) -> None:
    names = [spec.name for spec in specs]
    if names == list(template.leaves):
        return
    if len(set(names)) != len(names):
        raise PayloadError("names", f"{next(name for name in names if names.count(name) > 1)} came more than once")
    if names_missing := template.leaves.keys() - set(names):
        raise PayloadError("names", f"{min(names_missing)} is missing")
    if names_extra := set(names) - template.leaves.keys():
        raise PayloadError("names", f"{min(names_extra)} was not asked for")


def _sum_of_squares(name: str, dtype: str, values: NDArray[Any]) -> float:
    """The sum of squares in float64. Raises PayloadError if a value or its square is not finite.

    A NaN or an infinity anywhere makes the sum non-finite, so one pass finds both.
    """
    scratch = np.empty(min(_BLOCK, values.size))
    total = 0.0
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        wide = scratch[: block.size]
        np.copyto(wide, widened(block) if dtype == "bfloat16" else block)
        total += float(np.dot(wide, wide))
        if not math.isfinite(total):
            if np.isfinite(wide).all():
                raise PayloadError(
                    "norm", f"{name} has values beyond any norm, such as {float(np.abs(wide).max()):.3g}"
                )
            raise PayloadError("nonfinite", f"{name} has values that are not finite")
    return total


def _mapped(directory: Path, size: int, parts: Sequence[memoryview], offsets: Sequence[int]) -> memoryview:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, prefix="payload-", buffering=0) as file:
            for part, offset in zip(parts, offsets, strict=True):
                write_at(file.fileno(), part, offset)
            os.ftruncate(file.fileno(), size)
            return mapped(file.fileno(), size)
    except OSError as error:
        raise FedemuError(f"cannot keep a payload of {size} bytes in {directory}: {refusal_of(error)}") from error
