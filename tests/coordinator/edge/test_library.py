"""The blobs of an edge."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.edge.library import Library
from fedemu.protocol import messages as wire
from fedemu.protocol.ids import digest_of

BLOB = b"0123456789"
REF = wire.BlobRef(key="model", digest=digest_of(BLOB), size=len(BLOB))


def test_who_repeats_a_request_while_the_edge_fetches_the_blob_is_served_once(tmp_path: Path) -> None:
    asked: list[Any] = []
    sent: list[tuple[bytes, int]] = []
    library = Library(
        tmp_path, asked.append, lambda peer, blob, frames: sent.append((peer, blob.offset)), lambda: 0.0,
        lambda size: None, lambda size, reply: None,
    )  # fmt: skip
    library.read(wire.Offer(blobs=(REF,), round=1))
    for _ in range(3):
        for offset in (0, 5):
            assert library.answer(b"machine", wire.Need(digest=REF.digest, offset=offset, length=5))
    assert library.answer(b"gone", wire.Need(digest=REF.digest, offset=0, length=5))
    library.forget(b"gone")
    library.receive(wire.Blob(digest=REF.digest, offset=0, size=len(BLOB)), BLOB)
    assert len(asked) == 1
    assert sent == [(b"machine", 0), (b"machine", 5)]


def test_a_blob_that_only_a_work_has_named_is_removed_when_its_rounds_are_over(tmp_path: Path) -> None:
    library = Library(
        tmp_path, lambda need: None, lambda peer, blob, frames: None, lambda: 0.0, lambda size: None,
        lambda size, reply: None,
    )  # fmt: skip
    work = wire.Work(
        ask="1.0.0", program="train", task=0, start=0.0, shared=(REF,), state=None, download_bytes=0, upload_bytes=0,
        passes=1.0, deadline=1.0, durable_round=0,
    )  # fmt: skip
    library.read(work)
    assert library.answer(b"machine", wire.Need(digest=REF.digest, offset=0, length=10))
    library.receive(wire.Blob(digest=REF.digest, offset=0, size=len(BLOB)), BLOB)
    left = []
    for round in (2, 3):
        library.read(wire.Offer(blobs=(), round=round))
        left.append([path.name for path in tmp_path.iterdir()])
    assert left == [[REF.digest], []]


def test_a_blob_that_the_disk_does_not_give_is_fetched_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    sent: list[Any] = []
    library = Library(
        tmp_path, asked.append, lambda peer, message, frames: sent.append(message), lambda: 0.0, lambda size: None,
        lambda size, reply: None,
    )  # fmt: skip
    library.read(wire.Offer(blobs=(REF,), round=1))
    whole = wire.Blob(digest=REF.digest, offset=0, size=len(BLOB))
    library.receive(whole, BLOB)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    need = wire.Need(digest=REF.digest, offset=0, length=10)
    with monkeypatch.context() as broken:
        broken.setattr(os, "pread", fail)
        broken.setattr("fedemu.protocol.blobs.store.digest_of_file", fail)
        for _ in range(2):
            assert library.answer(b"machine", need)
    assert len(asked) == 2, "it is asked for once more"
    library.receive(whole, BLOB)
    assert isinstance(sent[0], wire.Refused)
    assert sent[1:] == [whole]
