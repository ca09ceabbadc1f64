"""Trees as blobs: the shared trees of an ask are published by digest, and peers fetch them in chunks."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from fedemu.algorithms.interface import Forest, Tree
from fedemu.algorithms.trees import declared_dtypes, to_arrays
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.errors import BlobError, FedemuError
from fedemu.protocol.host.files import refusal_of, shortage
from fedemu.protocol.ids import Digest
from fedemu.protocol.messages import Blob, BlobRef, Need, TensorSpec
from fedemu.protocol.tensors import pack


def pack_tree(tree: Tree) -> tuple[tuple[TensorSpec, ...], list[memoryview]]:
    """A tree as specs and frames of a message."""
    return pack(to_arrays(tree), declared_dtypes(tree))


class Shelf:
    """The blobs of a run. Some are kept to its end, others as long as they belong to one of the last two asks."""

    def __init__(self, store: BlobStore) -> None:
        self.reader = ThreadPoolExecutor(1, "blobs")
        """The thread that reads large chunks: a slow disk must not hold the event loop."""
        self._store = store
        self._kept: dict[Digest, None] = {}
        self.kept_bytes = 0
        """The size of the blobs that are published for the whole run."""
        self._recent: list[frozenset[Digest]] = []

    def close(self) -> None:
        """Remove every blob. A run that is resumed publishes them again."""
        self.reader.shutdown(cancel_futures=True)
        with contextlib.suppress(OSError):
            self._store.evict(().__contains__)
            self._store.directory.rmdir()

    def keep(self, key: str, data: bytes) -> BlobRef:
        """Publish a blob for the whole run."""
        digest = self._store.put(data)
        self._kept[digest] = None
        self.kept_bytes += len(data)
        return BlobRef(key=key, digest=digest, size=len(data))

    def publish(self, shared: Forest) -> tuple[BlobRef, ...]:
        """Publish the trees of one ask, one blob per key, and remove those of old asks."""
        refs = []
        for key, tree in shared.items():
            data = encode_tree(to_arrays(tree), declared_dtypes(tree))
            refs.append(BlobRef(key=key, digest=self._store.put(data), size=len(data)))
        digests = frozenset(Digest(ref.digest) for ref in refs)
        if not self._recent or digests != self._recent[-1]:
            self._recent = [*self._recent[-1:], digests]
            self._store.evict((self._kept.keys() | frozenset[Digest]().union(*self._recent)).__contains__)
        return tuple(refs)

    def answer(self, need: Need) -> tuple[Blob, memoryview]:
        """The chunk that a peer asks for. BlobError if there is no such blob.

        FedemuError if there is one, and the disk does not give it: devices would wait for it, and nobody would know.
        """
        digest = Digest(need.digest)
        self.require(digest)
        try:
            return self._store.answer(need)
        except BlobError as error:
            self.require(digest)  # its ask may have ended just now
            if not isinstance(cause := error.__cause__, OSError) or shortage(cause):  # a shortage passes
                raise
            folder = self._store.directory
            raise FedemuError(
                f"the blob {digest}, which devices need, cannot be read from {folder}: {refusal_of(cause)}"
            ) from error

    def require(self, digest: Digest) -> None:
        """Raise BlobError if there is no such blob."""
        if digest not in self._kept and not any(digest in recent for recent in self._recent):
            raise BlobError(f"The blob {digest} does not belong to this run, or its ask is over.")
