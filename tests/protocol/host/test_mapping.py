"""Files as memory."""

import ctypes
import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedemu.protocol.host import mapping
from fedemu.protocol.host.mapping import mapped


def regions(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


def test_a_mapping_outlives_the_file_and_its_descriptor_and_ends_with_the_last_view(
    tmp_path: Path, descriptors: Callable[[], set[str]]
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(250)) * 100)
    descriptor = os.open(path, os.O_RDONLY)
    before = descriptors()
    array = np.frombuffer(mapped(descriptor, 25_000), np.uint8)[5:10]
    assert not descriptors() - before
    os.close(descriptor)
    path.unlink()
    assert array.tolist() == [5, 6, 7, 8, 9]
    assert regions(path) == 1
    del array
    gc.collect()
    assert regions(path) == 0


def test_a_mapping_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    with (tmp_path / "file").open("rb") as file:
        view = mapped(file.fileno(), 7)
        with pytest.raises(TypeError, match="read-only"):
            view[0] = 0
        assert not np.frombuffer(view, np.uint8).flags.writeable
        assert bytes(view) == b"content"


def test_what_cannot_be_mapped_is_an_os_error() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(OSError, match="Illegal seek"):
            mapped(reader, 10)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_file_in_a_file_system_that_maps_none_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int | None:
        ctypes.set_errno(errno.ENODEV)
        return mapping._FAILED

    monkeypatch.setattr(mapping, "_libc", SimpleNamespace(mmap=refuse))
    (tmp_path / "file").write_bytes(b"content")
    with (tmp_path / "file").open("rb") as file:
        view = mapped(file.fileno(), 7)
        assert (bytes(view), view.readonly) == (b"content", True)
        with pytest.raises(OSError, match="the file ends early"):
            mapped(file.fileno(), 8)
