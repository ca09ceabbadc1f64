"""Whether what is built again is the same, as all processes of a run have to build it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FunctionType, ModuleType

import numpy as np
import torch
from torch import Tensor


def difference(one: object, other: object) -> str | None:
    """The name under which two objects that were built in the same way have generators, tensors or arrays that differ.

    It looks into attributes, items, and variables around functions. None if nothing is found. Tensors and arrays may
    differ by rounding, as where they were computed by another number of threads.
    """
    return _find("", one, other, set())


def _find(name: str, one: object, other: object, seen: set[int]) -> str | None:
    if one is other or id(one) in seen:
        return None
    seen.add(id(one))
    if (content := _content(one)) is not None:
        return None if _equal(content, _content(other)) else name
    parts, others = dict(_parts(one)), dict(_parts(other))
    found = (_find(str(part), parts[part], others[part], seen) for part in parts if part in others)
    return next((name if each.isdecimal() else each for each in found if each is not None), None)


def _equal(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.shape == other.shape and np.allclose(one, other, rtol=1e-5, equal_nan=True)
    return type(one) is type(other) and one == other


def _content(thing: object) -> object:
    """The state of a generator, or the numbers of a tensor or an array. None for everything else."""
    match thing:
        case np.random.Generator():
            return repr(thing.bit_generator.state)
        case np.random.RandomState():
            return repr(thing.get_state())
        case random.Random() if not isinstance(thing, random.SystemRandom):
            return thing.getstate()
        case torch.Generator():
            return bytes(thing.get_state().numpy())
        case Tensor() if thing.layout is torch.strided:
            return thing.detach().to("cpu", torch.complex128).numpy()
        case np.ndarray() if thing.dtype.kind in "biufc":
            return thing.astype(np.complex128)
    return None


def _parts(thing: object) -> Iterator[tuple[object, object]]:
    match thing:
        case type() | ModuleType():
            return
        case Mapping():
            yield from thing.items()
        case list() | tuple():
            yield from enumerate(thing)
        case FunctionType():
            for name, cell in zip(thing.__code__.co_freevars, thing.__closure__ or (), strict=True):
                with suppress(ValueError):  # the variable has no value yet
                    yield name, cell.cell_contents
    yield from getattr(thing, "__dict__", {}).items()
