"""Whether what is built again is the same, as all processes of a run have to build it, and a resumed run has to.

And whether what was built has changed since.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from types import FunctionType, ModuleType, NoneType

import numpy as np
import torch
from torch import Tensor

from fedemu.protocol.code.own_code import is_own

LARGE = 2**20
"""An array with more bytes is not looked at for changes. Nor is such a tensor of a module."""
_OF_TORCH = frozenset(vars(torch.nn.Module()))
"""What every module has: its tensors, its parts, its hooks and its mode."""


def difference(one: object, other: object) -> str | None:
    """The name under which two objects that were built in the same way have generators, tensors or arrays that differ.

    It looks into attributes, items, and variables around functions. None if nothing is found. Tensors and arrays may
    differ by rounding, as where they were computed by another number of threads.
    """
    return _find("", one, other, set())


class Original:
    """What an object of somebody's own code holds now, so that later changes are seen.

    It looks at plain values, tensors, generators, arrays of up to ``LARGE`` bytes and the sizes of collections, in
    attributes of objects and of their classes, in items, and in variables around functions. What objects of fedemu and
    of libraries hold does not count, unless ``everything`` does.

    It looks into no module of torch, unless with ``modules``. Their parameters and buffers do not count. All other
    tensors have then changed if their numbers have, because a module may compute them anew in each call.
    """

    def __init__(self, thing: object, everything: bool = False, modules: bool = False) -> None:
        self._everything, self._modules = everything, modules
        self._held = self._all(thing)

    @property
    def has_own(self) -> bool:
        """Whether there is anything of somebody's own."""
        return bool(self._held)

    def changed(self, thing: object) -> str | None:
        """The name of what the object holds otherwise by now, such as ``seen`` or ``memory.3``; None if nothing.

        What was added since the last call is no change yet, because it may be a cache. If it is another thing at the
        next call, it has changed.
        """
        if not self._held:
            return None
        now = self._all(thing)
        name = next((name for name, value in self._held.items() if now.get(name) != value), None)
        self._held = now
        return "its size" if name == "" else name

    def _all(self, thing: object) -> dict[str, object]:
        return dict(self._values("", thing, self._everything, set()))

    def _values(self, name: str, thing: object, own: bool, seen: set[int]) -> Iterator[tuple[str, object]]:
        """All values inside of ``thing`` by their names, or those that somebody's ``own`` object holds."""
        inside = id(thing) not in seen
        match thing:
            case None | bool() | int() | float() | complex() | str() | bytes():
                found: object = repr(thing)
                inside = False
            case Tensor():
                found = _numbers(thing) if self._modules else _Tensor(thing)
                inside = False
            case np.ndarray():
                found = thing.tobytes() if thing.nbytes <= LARGE else None
            case Mapping() | list() | tuple() | Set():
                found = len(thing)
            case _:
                found = _content(thing)
                own = self._everything or (own if found is not None else _is_own(thing))
                found = type(thing) if own and found is None else found
        if own and found is not None:
            yield name, found
        if inside and (self._modules or not isinstance(thing, torch.nn.Module)):
            seen.add(id(thing))
            parts = _parts_of_module(thing) if isinstance(thing, torch.nn.Module) else _parts(thing)
            for part, value in (*_parts_of_classes(thing), *parts):
                yield from self._values(f"{name}.{part}" if name else str(part), value, own, seen)


class _Tensor:
    """A tensor as it is now. Two of these are equal if it is the same one, and nothing was written to it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tensor) and other._tensor is self._tensor and other._version == self._version


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


def _numbers(tensor: Tensor) -> bytes | None:
    """The numbers of a tensor. None if it is large, or no array of numbers."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.nbytes > LARGE:
        return None
    numbers = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return numbers.reshape(-1).view(torch.uint8).numpy().tobytes()


def _is_own(thing: object) -> bool:
    """Whether a function or the class of an object is somebody's own, and no part of fedemu or of a library."""
    module = sys.modules.get(thing.__module__ if isinstance(thing, FunctionType) else type(thing).__module__)
    return is_own(getattr(module, "__file__", None) or "")


def _parts_of_classes(thing: object) -> Iterator[tuple[object, object]]:
    """The data that all objects of somebody's own classes share, unless one has something else by the same name."""
    for kind in () if type(thing).__module__ == "builtins" else reversed(type(thing).__mro__):
        if is_own(getattr(sys.modules.get(kind.__module__), "__file__", None) or ""):
            shared = ((name, value) for name, value in vars(kind).items() if not name.startswith("__"))
            yield from ((name, value) for name, value in shared if isinstance(value, _DATA))


def _parts_of_module(module: torch.nn.Module) -> Iterator[tuple[object, object]]:
    yield from ((name, value) for name, value in vars(module).items() if name not in _OF_TORCH)
    yield from module.named_children()


_DATA = (NoneType, bool, int, float, complex, str, bytes, Tensor, np.ndarray, Mapping, list, tuple, Set)


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
