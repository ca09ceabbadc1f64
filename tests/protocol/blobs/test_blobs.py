"""Tensor files, the blob store, and downloads that break off."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray

from fedemu.protocol.blobs.downloads import CHUNK
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.blobs.tree_file import decode_tree, encode_tree
from fedemu.protocol.errors import BlobError, MalformedMessage, UnwritableError
from fedemu.protocol.ids import Digest, digest_of
from fedemu.protocol.messages import Blob, Need

TREE: dict[str, NDArray[Any]] = {
    "bias": np.array([1.0, 2.0], np.float32),
    "labels/ü": np.array([[7], [8]], np.int64),
    "mask": np.array([True, False, True]),
    "empty": np.zeros((0, 4), np.float16),
    "scalar": np.array(3, np.int8),
}
UNKNOWN = Digest("0" * 64)


def part_of(store: BlobStore, digest: Digest, offset: int, length: int) -> memoryview:
    return store.answer(Need(digest=digest, offset=offset, length=length))[1]


def file_of(header: object, body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def entry(**changes: object) -> dict[str, object]:
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}}


class TestTrees:
    def test_the_bytes_are_those_of_the_format(self) -> None:
        assert encode_tree({"w": np.array([1.0], np.float32)}) == (
            b'\x38\x00\x00\x00\x00\x00\x00\x00{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}  \x00\x00\x80\x3f'
        )

    def test_the_safetensors_library_reads_them(self) -> None:
        read = safetensors.numpy.load(encode_tree(TREE))
        assert {name: array.tobytes() for name, array in read.items()} == {n: a.tobytes() for n, a in TREE.items()}

    def test_what_the_safetensors_library_writes_is_read(self) -> None:
        read = decode_tree(safetensors.numpy.save(TREE, metadata={"by": "someone"}))
        assert list(read) == sorted(TREE)
        for name, array in TREE.items():
            np.testing.assert_array_equal(read[name], array, strict=True)

    def test_the_order_of_insertion_and_the_layout_in_memory_do_not_matter(self) -> None:
        square = np.arange(4, dtype=np.float32).reshape(2, 2)
        one = {"a": square, "b": np.array(1.0)}
        other = {"b": np.array(1.0, ">f8"), "a": np.asfortranarray(square)}
        assert encode_tree(one) == encode_tree(other)

    def test_every_array_is_aligned(self) -> None:
        read = decode_tree(encode_tree({"a": np.zeros(3, np.int8), "b": np.zeros(1), "c": np.zeros(1, np.int16)}))
        assert all(array.flags.aligned for array in read.values())

    def test_an_empty_tree_is_a_file_too(self) -> None:
        assert decode_tree(encode_tree({})) == {}

    def test_bfloat16_is_declared_and_comes_back_as_bits(self) -> None:
        data = encode_tree({"w": np.array([0x3F80], np.uint16)}, {"w": "bfloat16"})
        assert b'"BF16"' in data
        assert decode_tree(data)["w"].tolist() == [0x3F80]
        with pytest.raises(MalformedMessage, match="declare it as bfloat16"):
            encode_tree({"w": np.array([0x3F80], np.uint16)})

    def test_a_file_is_mapped_read_only_and_outlives_its_name(self, tmp_path: Path) -> None:
        path = tmp_path / "tree"
        path.write_bytes(encode_tree(TREE))
        read = decode_tree(path)
        path.unlink()
        assert read["bias"].tolist() == [1.0, 2.0]
        assert not read["bias"].flags.writeable
        assert not read["bias"].flags.owndata

    @pytest.mark.parametrize(
        "data",
        [
            b"",
            b"\x00" * 7,
            b"\xff" * 64,
            file_of([]),
            file_of({"x": 1}),
            file_of("[" * 100_000),
            file_of(entry(), bytes(7)),
            file_of(entry(), bytes(9)),
            file_of(entry(data_offsets=[4, 12]), bytes(12)),
            file_of(entry(data_offsets=[8, 0]), bytes(8)),
            file_of(entry(data_offsets=[0])),
            file_of(entry(shape=[3]), bytes(8)),
            file_of(entry(shape=[-2]), bytes(8)),
            file_of(entry(shape=[2.0]), bytes(8)),
            file_of(entry(shape=None), bytes(8)),
            file_of(entry(dtype="U16"), bytes(8)),
            file_of(entry(dtype=["F32"]), bytes(8)),
            (8).to_bytes(8, "little") + b"\xff" * 8,
            (10**5).to_bytes(8, "little") + b"[" * 10**5,
        ],
    )
    @pytest.mark.usefixtures("uncollected")
    def test_bytes_that_are_no_tensor_file_are_refused(self, data: bytes) -> None:
        with pytest.raises(BlobError, match="not a tensor file"):
            decode_tree(data)

    def test_a_missing_or_empty_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BlobError, match="cannot be read"):
            decode_tree(tmp_path / "nothing")
        (tmp_path / "empty").touch()
        with pytest.raises(BlobError, match="cannot be read"):
            decode_tree(tmp_path / "empty")


class TestStore:
    def test_a_blob_is_named_by_its_digest(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path / "new" / "blobs")
        digest = store.put(b"hello")
        assert digest == "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
        assert store.put(b"hello") == digest
        assert store.has(digest)
        assert store.answer(Need(digest=digest, offset=3, length=1))[0] == Blob(digest=digest, offset=3, size=5)
        assert store.path(digest).read_bytes() == b"hello"
        assert [path.name for path in store.directory.iterdir()] == [digest]

    @pytest.mark.parametrize("content", [b"", b"hellp", b"hell"])
    def test_a_blob_that_an_earlier_process_left_damaged_is_removed(
        self, tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        digest = BlobStore(tmp_path).put(b"hello")
        path = BlobStore(tmp_path).path(digest)
        path.chmod(0o644)
        path.write_bytes(content)
        later = BlobStore(tmp_path)
        assert not later.has(digest)
        assert f"{digest} is damaged" in caplog.text
        assert not path.exists()
        assert later.receive(digest, 0, 5, b"hello")
        assert later.has(digest)

    def test_a_blob_that_the_disk_cannot_read_any_more_is_removed_and_fetched_anew(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        digest = BlobStore(tmp_path).put(b"hello")
        later = BlobStore(tmp_path)

        def fail(path: Path) -> Digest:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as broken:
            broken.setattr("fedemu.protocol.blobs.store.digest_of_file", fail)
            assert not later.has(digest)
        assert "is damaged: it can't be read (Input/output error); it is removed" in caplog.text
        assert not later.path(digest).exists()
        assert later.receive(digest, 0, 5, b"hello")

    def test_a_blob_that_somebody_doubts_is_read_again(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        digest = store.put(b"hello")
        store.path(digest).chmod(0o644)
        store.path(digest).write_bytes(b"hellp")
        assert store.has(digest)
        store.doubt(digest)
        assert not store.has(digest)

    @pytest.mark.parametrize("origin", ["made", "left", "fetched"])
    def test_a_blob_is_read_for_its_digest_once_at_most_while_it_is_there(self, tmp_path: Path, origin: str) -> None:
        store = BlobStore(tmp_path)
        if origin == "left":
            BlobStore(tmp_path).put(b"hello")
            assert store.has(digest_of(b"hello"))
        elif origin == "made":
            store.put(b"hello")
        else:
            assert store.receive(digest_of(b"hello"), 0, 5, b"hello")
        digest = digest_of(b"hello")
        path = store.path(digest)
        path.chmod(0o644)
        path.write_bytes(b"hellp")
        assert store.has(digest)
        store.evict(().__contains__)
        path.write_bytes(b"hellp")
        assert not store.has(digest), "it is another file"

    def test_parts_are_read_up_to_the_end(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        digest = store.put(b"0123456789")
        assert part_of(store, digest, 0, 4) == b"0123"
        assert part_of(store, digest, 8, 4) == b"89"
        assert part_of(store, digest, 10, 4) == b""
        assert len(part_of(store, store.put(bytes(2 * CHUNK)), 1, 2 * CHUNK)) == CHUNK
        with pytest.raises(BlobError, match="has 10 bytes and none from 11 on"):
            part_of(store, digest, 11, 1)

    def test_parts_that_wait_to_be_sent_take_no_memory_and_outlive_their_blob(
        self, tmp_path: Path, descriptors: Any
    ) -> None:
        store = BlobStore(tmp_path)
        digest = store.put(b"0123456789" * 10_000)
        before = descriptors()
        tracemalloc.start()
        parts = [part_of(store, digest, offset, 50_000) for offset in range(1000)]
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < 1_000_000
        assert len(descriptors() - before) < 100
        store.evict(().__contains__)
        assert parts[3][:10] == b"3456789012"
        memory = weakref.ref(parts[0].obj)
        del parts
        assert memory() is None, "nothing of it is kept"
        with pytest.raises(BlobError, match="is not here"):
            part_of(store, digest, 0, 1)

    def test_a_part_of_a_blob_that_was_damaged_and_made_anew_is_the_new_one(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        digest = store.put(b"hello")
        store.path(digest).chmod(0o644)
        store.path(digest).write_bytes(b"hellp")
        assert part_of(store, digest, 0, 5) == b"hellp"
        store.doubt(digest)
        assert store.put(b"hello") == digest
        assert part_of(store, digest, 0, 5) == b"hello"

    def test_a_sector_that_cannot_be_read_is_an_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = BlobStore(tmp_path)
        digest = store.put(b"hello")

        def broken(*_: object) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pread", broken)
        with pytest.raises(BlobError, match="can't be read"):
            part_of(store, digest, 0, 5)

    def test_a_blob_that_cannot_be_mapped_is_an_error_and_keeps_no_file_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, descriptors: Any
    ) -> None:
        store = BlobStore(tmp_path)
        digest = store.put(b"hello")

        def full(descriptor: int, size: int) -> memoryview:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        monkeypatch.setattr("fedemu.protocol.blobs.store.mapped", full)
        before = descriptors()
        with pytest.raises(BlobError, match="Cannot allocate memory"):
            part_of(store, digest, 0, 5)
        assert not descriptors() - before

    def test_a_blob_that_another_process_has_removed_is_made_anew(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        digest = store.put(b"hello")
        BlobStore(tmp_path).evict(().__contains__)
        assert not store.has(digest)
        assert store.put(b"hello") == digest
        assert store.path(digest).read_bytes() == b"hello"

    def test_a_blob_that_was_cut_off_is_read_up_to_its_end(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        digest = store.put(b"x" * 20_000)
        assert len(part_of(store, digest, 0, 20_000)) == 20_000
        store.path(digest).chmod(0o644)
        os.truncate(store.path(digest), 5)
        assert bytes(part_of(store, digest, 0, 20_000)) == b"xxxxx"
        store.path(digest).write_bytes(b"x" * 20_000)  # another process has fetched it anew
        assert len(part_of(store, digest, 0, 20_000)) == 20_000

    def test_an_empty_blob_has_an_empty_part(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        assert part_of(store, store.put(b""), 0, 1) == b""

    def test_a_blob_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        assert not store.has(UNKNOWN)
        with pytest.raises(BlobError, match=f"{UNKNOWN} is not here"):
            part_of(store, UNKNOWN, 0, 1)

    def test_a_name_that_is_no_digest_never_becomes_a_path(self, tmp_path: Path) -> None:
        with pytest.raises(BlobError, match="not a digest"):
            part_of(BlobStore(tmp_path), Digest("../../etc/passwd"), 0, 1)

    def test_blobs_that_are_not_kept_are_evicted_and_stay_usable_where_mapped(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        old, new = store.put(encode_tree(TREE)), store.put(b"new")
        (tmp_path / "notes.txt").write_text("not a blob")
        mapped = decode_tree(store.path(old))
        store.evict({new}.__contains__)
        assert (store.has(old), store.has(new)) == (False, True)
        assert mapped["bias"].tolist() == [1.0, 2.0]
        store.evict(lambda digest: digest != new)
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_a_folder_that_cannot_be_used_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(BlobError, match=r"the blob folder .*file cannot be used"):
            BlobStore(tmp_path / "file")

    def test_a_folder_that_was_moved_meanwhile_is_named(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path / "blobs")
        store.put(b"old")
        (tmp_path / "blobs").rename(tmp_path / "moved")
        with pytest.raises(BlobError, match=r"the blob folder .*/blobs cannot be used: No such file or directory"):
            store.evict(().__contains__)

    def test_a_blob_that_may_not_be_removed_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = BlobStore(tmp_path)
        store.put(b"old")

        def refuse(*_: object, **__: object) -> None:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr(Path, "unlink", refuse)
        with pytest.raises(BlobError, match=r"the blob folder .* cannot be used: Read-only file system"):
            store.evict(().__contains__)


DATA = bytes(range(256)) * 40
SIZE = len(DATA)
DIGEST = digest_of(DATA)


class TestDownloads:
    def test_chunks_in_order_make_the_blob(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        assert not store.receive(DIGEST, 0, SIZE, DATA[:4096])
        assert not store.has(DIGEST)
        assert store.receive(DIGEST, 4096, SIZE, DATA[4096:])
        assert store.has(DIGEST)
        assert store.path(DIGEST).read_bytes() == DATA
        assert len(list(tmp_path.iterdir())) == 1

    def test_chunks_may_come_in_any_order_again_and_overlapping(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        for start, end in ((3000, 4000), (9000, SIZE), (3000, 4000), (0, 1000), (500, 1500), (3500, 9500)):
            assert not store.receive(DIGEST, start, SIZE, DATA[start:end])
        assert not store.receive(DIGEST, 200, SIZE, DATA[200:300])
        assert store.receive(DIGEST, 1500, SIZE, DATA[1500:3000])
        assert store.path(DIGEST).read_bytes() == DATA
        assert store.receive(DIGEST, 0, SIZE, DATA[:1000])
        store.evict(().__contains__)
        assert not store.receive(DIGEST, 0, SIZE, DATA[:1000]), "it is fetched from its beginning"
        assert store.receive(DIGEST, 1000, SIZE, DATA[1000:])
        assert store.path(DIGEST).read_bytes() == DATA

    def test_corrupt_data_is_refused_and_can_be_fetched_anew(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        store.receive(DIGEST, 0, SIZE, DATA[:1000])
        with pytest.raises(BlobError, match="has to be fetched again"):
            store.receive(DIGEST, 1000, SIZE, bytes(SIZE - 1000))
        assert not store.has(DIGEST)
        assert list(tmp_path.iterdir()) == []
        assert store.receive(DIGEST, 0, SIZE, DATA)

    @pytest.mark.parametrize(("offset", "size", "length"), [(0, SIZE + 1, 10), (SIZE, SIZE, 1), (-1, SIZE, 1)])
    def test_chunks_that_contradict_the_size_are_refused(
        self, tmp_path: Path, offset: int, size: int, length: int
    ) -> None:
        store = BlobStore(tmp_path)
        store.receive(DIGEST, 0, SIZE, DATA[:10])
        with pytest.raises(BlobError, match="do not belong to the blob"):
            store.receive(DIGEST, offset, size, bytes(length))
        assert list(tmp_path.iterdir()) == []

    def test_too_many_gaps_are_refused(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        for offset in range(1, 2048, 2):
            store.receive(DIGEST, offset, SIZE, DATA[offset : offset + 1])
        with pytest.raises(BlobError, match="too many pieces"):
            store.receive(DIGEST, 2049, SIZE, DATA[2049:2050])
        assert list(tmp_path.iterdir()) == []

    def test_pieces_that_touch_count_as_one_however_long_the_first_is_missing(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        for offset in range(1, 2048):
            store.receive(DIGEST, offset, SIZE, DATA[offset : offset + 1])
        store.receive(DIGEST, 2048, SIZE, DATA[2048:])
        assert store.receive(DIGEST, 0, SIZE, DATA[:1])

    def test_an_empty_blob_is_complete_at_once(self, tmp_path: Path) -> None:
        assert BlobStore(tmp_path).receive(digest_of(b""), 0, 0, b"")

    def test_an_abandoned_download_leaves_nothing(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        store.receive(DIGEST, 0, SIZE, DATA[:10])
        store.abandon(DIGEST)
        store.abandon(UNKNOWN)
        store.receive(DIGEST, 5, SIZE, DATA[5:10])
        store.close()
        assert list(tmp_path.iterdir()) == []

    def test_a_large_blob_needs_the_memory_of_a_chunk(self, tmp_path: Path) -> None:
        size = 24 * CHUNK
        chunk = bytes(CHUNK)
        digest = Digest(hashlib.sha256(bytes(size)).hexdigest())
        store = BlobStore(tmp_path)
        tracemalloc.start()
        try:
            for offset in (*range(CHUNK, size, CHUNK), 0):
                store.receive(digest, offset, size, chunk)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert store.path(digest).stat().st_size == size
        assert peak < 3 * CHUNK

    def test_a_crash_leaves_a_partial_file_that_the_next_start_removes(self, tmp_path: Path) -> None:
        crash = (
            "import os, sys; from pathlib import Path; from fedemu.protocol.blobs.store import BlobStore\n"
            f"BlobStore(Path(sys.argv[1])).receive({DIGEST!r}, 0, {SIZE}, b'x'); os._exit(0)"
        )
        subprocess.run([sys.executable, "-c", crash, str(tmp_path)], check=True, timeout=60)
        assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]
        BlobStore(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_opening_the_folder_does_not_disturb_a_running_download(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path)
        store.receive(DIGEST, 0, SIZE, DATA[:10])
        assert not BlobStore(tmp_path).has(DIGEST)
        assert store.receive(DIGEST, 10, SIZE, DATA[10:])

    def test_two_stores_of_one_folder_may_fetch_the_same_blob(self, tmp_path: Path) -> None:
        one, other = BlobStore(tmp_path), BlobStore(tmp_path)
        one.receive(DIGEST, 0, SIZE, DATA[:10])
        other.receive(DIGEST, 0, SIZE, DATA[:20])
        assert one.receive(DIGEST, 10, SIZE, DATA[10:])
        assert other.receive(DIGEST, 20, SIZE, DATA[20:])
        assert [path.name for path in tmp_path.iterdir()] == [DIGEST]

    def test_a_partial_file_that_somebody_cuts_short_is_refused_and_the_blob_can_be_fetched_anew(
        self, tmp_path: Path
    ) -> None:
        store = BlobStore(tmp_path)
        store.receive(DIGEST, 5000, SIZE, DATA[5000:])
        (partial,) = tmp_path.iterdir()
        partial.chmod(0o600)  # only root can change it as it is
        os.truncate(partial, 6000)
        with pytest.raises(BlobError, match="was cut short"):
            store.receive(DIGEST, 0, SIZE, DATA[:5000])
        assert list(tmp_path.iterdir()) == []
        assert store.receive(DIGEST, 0, SIZE, DATA)

    def test_a_folder_that_is_gone_is_named(self, tmp_path: Path) -> None:
        store = BlobStore(tmp_path / "blobs")
        store.directory.rmdir()
        with pytest.raises(UnwritableError, match=r"cannot be written to .*blobs: No such file or directory"):
            store.receive(DIGEST, 0, SIZE, DATA)
        store.directory.mkdir()
        assert store.receive(DIGEST, 0, SIZE, DATA)

    def test_a_full_disk_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        store = BlobStore(tmp_path)

        def no_space(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", no_space)
        with pytest.raises(BlobError, match=r"cannot be written to .*: the disk is full"):
            store.receive(DIGEST, 0, SIZE, DATA)
        with pytest.raises(BlobError, match=r"cannot be written to .*: the disk is full"):
            store.put(DATA)
        assert list(tmp_path.iterdir()) == []
