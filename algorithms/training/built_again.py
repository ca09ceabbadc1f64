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

    It looks into attributes, items, and variables around functions. None if nothing is found.
    """
    return _find("", one, other, set())


def _find(name: str, one: object, other: object, seen: set[int]) -> str | None:
    if one is other or id(one) in seen:
        return None
    seen.add(id(one))
    if (content := _content(one)) is not None:
        return name if content != _content(other) else None
    parts, others = dict(_parts(one)), dict(_parts(other))
    found = (_find(str(part), parts[part], others[part], seen) for part in parts if part in others)
    return next((name if each.isdecimal() else each for each in found if each is not None), None)


def _content(thing: object) -> object:
    """What has to be equal in two generators, tensors or arrays. None for everything else."""
    match thing:
        case np.random.Generator():
            return repr(thing.bit_generator.state)
        case np.random.RandomState():
            return repr(thing.get_state())
        case random.Random() if not isinstance(thing, random.SystemRandom):
            return thing.getstate()
        case torch.Generator():
            return _content(thing.get_state())
        case Tensor() if thing.layout is torch.strided:
            return str(thing.dtype), thing.shape, bytes(thing.detach().contiguous().flatten().view(torch.uint8).numpy())
        case np.ndarray() if not thing.dtype.hasobject:
            return thing.dtype.str, thing.shape, thing.tobytes()
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
