"""Files as memory. It holds no file descriptor, so thousands of them may be open."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_ALIGNMENT = 64


def aligned(sizes: Iterable[int]) -> tuple[list[int], int]:
    """The offsets of buffers of these sizes in one piece of memory, and its size.

    Offsets are aligned, so that each buffer can be viewed as an array of any dtype.
    """
    offsets, end = [], 0
    for size in sizes:
        offsets.append(-(-end // _ALIGNMENT) * _ALIGNMENT)
        end = offsets[-1] + size
    return offsets, end


def mapped(descriptor: int, size: int) -> memoryview:
    """The first ``size`` bytes of an open file, which must not be empty, read-only. Raises OSError.

    The descriptor may be closed afterwards. The memory is given back when nothing refers to the view any more. Python's
    own ``mmap`` and numpy's would keep a copy of the descriptor until then. In a file system that maps no files it
    is a copy.
    """
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_PRIVATE, descriptor, 0)
    if address == _FAILED:
        number = ctypes.get_errno()
        if number != errno.ENODEV:
            raise OSError(number, os.strerror(number))
        return _read(descriptor, size)
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B").toreadonly()


def _read(descriptor: int, size: int) -> memoryview:
    memory = memoryview((ctypes.c_ubyte * size)()).cast("B")
    position = 0
    while position < size:
        count = os.preadv(descriptor, [memory[position:]], position)
        if not count:
            raise OSError(errno.EIO, "the file ends early")
        position += count
    return memory.toreadonly()
