"""Memory that nobody can change any more. Processes of one machine share it, and need not trust each other.

One process copies buffers into it once, and passes its descriptor on over a Unix socket. The others only map it. Its
seals (``man memfd_create``) keep everybody from writing into it and from cutting it off. Where the kernel has no such
memory, or no more of it, nothing is sealed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, cast

import numpy as np

from fedemu.protocol.host.files import Buffer, write_at
from fedemu.protocol.host.mapping import aligned, mapped

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
MOST_KEPT: Final = 64
"""The most descriptors that a process keeps, to pass the memory on again. Further memory can be read all the same."""

_kept: dict[int, int] = {}
"""The descriptors of sealed memory, by the address at which it is mapped here."""


class Place(NamedTuple):
    """Where a buffer lies in sealed memory: the memory's descriptor, and the number of bytes before the buffer."""

    descriptor: int
    offset: int


def seal(buffers: Sequence[Buffer]) -> list[memoryview] | None:
    """Copies of buffers in sealed memory, read-only. None if there is no room for them.

    The buffers must not all be empty. The memory is given back when nothing refers to the copies any more.
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    offsets, size = aligned(map(len, views))
    try:
        descriptor = os.memfd_create("fedemu", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (OSError, AttributeError):
        return None
    try:
        os.ftruncate(descriptor, size)
        for buffer, offset in zip(views, offsets, strict=True):
            write_at(descriptor, buffer, offset)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        whole = _opened(descriptor, size)
    except OSError:
        os.close(descriptor)
        return None
    return [whole[offset : offset + len(buffer)] for buffer, offset in zip(views, offsets, strict=True)]


def adopt(descriptor: int) -> memoryview:
    """The sealed memory of a descriptor that another process has passed on, read-only.

    The descriptor belongs to this function from now on. Raises ValueError if others could still change the memory, and
    OSError if it cannot be mapped.
    """
    try:
        try:
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise ValueError("a descriptor is not one of sealed memory")
        return _opened(descriptor, os.fstat(descriptor).st_size)
    except (OSError, ValueError):
        os.close(descriptor)
        raise


def place_of(buffer: memoryview) -> Place | None:
    """Where a buffer lies in sealed memory of which this process keeps the descriptor. None if it does not."""
    memory: Any = buffer.obj
    if not isinstance(memory, ctypes.Array):
        return None
    address = ctypes.addressof(memory)
    descriptor = _kept.get(address)
    if descriptor is None:
        return None
    return Place(descriptor, np.frombuffer(buffer, np.uint8).ctypes.data - address)


def _opened(descriptor: int, size: int) -> memoryview:
    """The memory behind a descriptor, which is kept if there are not too many."""
    view = mapped(descriptor, size)
    if len(_kept) < MOST_KEPT:
        address = ctypes.addressof(cast("ctypes.Array[Any]", view.obj))
        _kept[address] = descriptor
        weakref.finalize(view.obj, _forget, address).atexit = False
    else:
        os.close(descriptor)
    return view


def _forget(address: int) -> None:
    os.close(_kept.pop(address))
