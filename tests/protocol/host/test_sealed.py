"""Sealed memory: what is in it, that nobody can change it, and that nothing of it is left."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemu.protocol.host import sealed
from fedemu.protocol.host.sealed import adopt, place_of, seal


def test_buffers_are_copied_one_after_the_other_and_known_by_their_places() -> None:
    first, second = seal([b"abc", memoryview(bytearray(range(200)))])
    assert (bytes(first), bytes(second)) == (b"abc", bytes(range(200)))
    here, there = place_of(first), place_of(second[50:])
    assert here is not None
    assert there is not None
    assert (here.offset, there.offset) == (0, 64 + 50)
    assert here.descriptor == there.descriptor
    assert place_of(memoryview(b"abc")) is None
    assert place_of(memoryview(bytearray(3))) is None


def test_nobody_can_write_or_cut_sealed_memory() -> None:
    (view,) = seal([b"abc"])
    descriptor = place_of(view).descriptor
    for change in (lambda: os.pwrite(descriptor, b"x", 0), lambda: os.ftruncate(descriptor, 0)):
        with pytest.raises(PermissionError):
            change()
    assert view.readonly
    assert bytes(view) == b"abc"


def test_a_descriptor_that_was_passed_on_shows_the_same_memory() -> None:
    (view,) = seal([b"abc"])
    found = adopt(os.dup(place_of(view).descriptor))
    assert bytes(found[:3]) == b"abc"
    again = adopt(os.dup(place_of(found).descriptor))
    assert bytes(again[:3]) == b"abc"


@pytest.mark.parametrize("kind", ["file", "unsealed", "pipe", "half sealed"])
def test_memory_that_others_could_change_is_refused_and_its_descriptor_closed(
    kind: str, tmp_path: Path, descriptors: Callable[[], set[str]]
) -> None:
    before = descriptors()
    if kind == "file":
        path = tmp_path / "file"
        path.write_bytes(b"abc")
        descriptor = os.open(path, os.O_RDWR)
    elif kind == "pipe":
        descriptor, other = os.pipe()
        os.close(other)
    else:
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.write(descriptor, b"abc")
        if kind == "half sealed":
            sealed.fcntl.fcntl(descriptor, sealed.fcntl.F_ADD_SEALS, sealed.fcntl.F_SEAL_WRITE)
    with pytest.raises(ValueError, match="not one of sealed memory"):
        adopt(descriptor)
    assert not descriptors() - before


def test_sealed_memory_that_cannot_be_mapped_is_an_os_error_and_its_descriptor_closed(
    descriptors: Callable[[], set[str]],
) -> None:
    before = descriptors()
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    seals = sealed.fcntl.F_SEAL_SHRINK | sealed.fcntl.F_SEAL_GROW | sealed.fcntl.F_SEAL_WRITE
    sealed.fcntl.fcntl(descriptor, sealed.fcntl.F_ADD_SEALS, seals)
    with pytest.raises(OSError, match="Invalid argument"):
        adopt(descriptor)  # it is empty
    assert not descriptors() - before


def test_a_buffer_of_which_the_kernel_takes_only_a_part_at_once_is_copied_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:60], offset))
    first, second = seal([b"abc", bytes(range(200))])
    assert (bytes(first), bytes(second)) == (b"abc", bytes(range(200)))


def test_the_descriptor_goes_with_the_last_view(descriptors: Callable[[], set[str]]) -> None:
    before = descriptors()
    views = seal([b"abc", b"def"])
    part = views[1][1:]
    del views
    assert len(descriptors() - before) == 1
    assert bytes(part) == b"ef"
    del part
    assert not descriptors() - before


def test_memory_beyond_the_descriptors_that_are_kept_can_be_read_and_has_no_place(
    descriptors: Callable[[], set[str]],
) -> None:
    before = descriptors()
    views = [seal([bytes([number])])[0] for number in range(sealed.MOST_KEPT + 3)]
    assert len(descriptors() - before) == sealed.MOST_KEPT
    assert [place_of(view) is None for view in views[-4:]] == [False, True, True, True]
    assert bytes(views[-1]) == bytes([sealed.MOST_KEPT + 2])
    del views
    assert not descriptors() - before


def test_without_room_nothing_is_sealed(monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], set[str]]) -> None:
    before = descriptors()

    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        assert seal([b"abc"]) is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "memfd_create", full)
        assert seal([b"abc"]) is None
    with monkeypatch.context() as patch:
        patch.delattr(os, "memfd_create")
        assert seal([b"abc"]) is None
    assert not descriptors() - before
