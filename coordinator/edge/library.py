"""The blobs of an edge: each is fetched once from further up, held against its digest, and served to all below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedemu.protocol import messages as wire
from fedemu.protocol.blobs.fetch import Fetches, Step
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import Buffer
from fedemu.protocol.errors import BlobError
from fedemu.protocol.host.files import shortage
from fedemu.protocol.ids import AskId, Digest

KEPT_ROUNDS = 2
"""Blobs that were needed this many rounds ago, and not since, are removed."""


class Library:
    """Serves from ``folder``. ``say`` sends a message further up, and ``send`` one to a peer below."""

    def __init__(
        self,
        folder: Path,
        say: Callable[[wire.Message], None],
        send: Callable[[bytes, wire.Message, Sequence[Buffer]], None],
        clock: Callable[[], float],
        offered: Callable[[int], None],
        asked: Callable[[int, int], None],
    ) -> None:
        """Tell ``offered`` the bytes of each blob that becomes known, and ``asked`` those of each ask that begins.

        The latter are the bytes of the ask's blobs, and those of a reply to it.
        """
        self._store = BlobStore(folder)
        self._fetches = Fetches(self._store)
        self._say = say
        self._send = send
        self._clock = clock
        self._offered = offered
        self._asked = asked
        self._latest = ""
        self._known: dict[Digest, wire.BlobRef] = {}
        self._wanted: dict[Digest, int] = {}
        """The last round in which each blob was needed, so far as it is known."""
        self._waiting: dict[Digest, dict[tuple[bytes, int], wire.Need]] = {}
        """The requests for each blob that is not here yet, by peer and offset. A peer repeats what is not answered."""

    def read(self, message: wire.Message) -> None:
        """Learn of the blobs that a message for a peer names. An offer's blobs are fetched at once."""
        match message:
            case wire.Granted():
                self._know(message.experiment, message.partition)
            case wire.Work():
                if message.ask != self._latest:
                    self._latest = message.ask
                    self._asked(sum(ref.size for ref in message.shared), message.upload_bytes)
                self._want(message.shared, AskId.parse(message.ask).round)
            case wire.Offer():
                self._want(message.blobs, message.round)
                for ref in message.blobs:
                    self._step(self._fetches.want(ref, self._clock()))
                self._evict(message.round)

    def _want(self, refs: Sequence[wire.BlobRef], round: int) -> None:
        """Blobs are needed in a round. A machine that came after their offer knows them only from its devices' Work."""
        self._know(*refs)
        self._wanted.update((Digest(ref.digest), round) for ref in refs)

    def _know(self, *refs: wire.BlobRef) -> None:
        for ref in refs:
            if self._known.get(Digest(ref.digest)) != ref:
                self._known[Digest(ref.digest)] = ref
                self._offered(ref.size)

    def answer(self, peer: bytes, need: wire.Need) -> bool:
        """Answer a request now or later. False if the blob is not known here, so that others have to be asked."""
        digest = Digest(need.digest)
        if self._store.has(digest):
            self._serve(peer, need)
            return True
        ref = self._known.get(digest)
        if ref is None:
            return False
        self._waiting.setdefault(digest, {})[peer, need.offset] = need
        self._step(self._fetches.want(ref, self._clock()))
        return True

    def receive(self, blob: wire.Blob, data: Buffer) -> None:
        """A chunk has come from further up."""
        self._step(self._fetches.receive(blob, data, self._clock()))

    def refused(self) -> None:
        """The other side lacks a blob that was asked for."""
        self._fetches.refused()

    def restart(self) -> None:
        """The connection further up is a new one."""
        self._step(self._fetches.restart(self._clock()))

    def tick(self) -> None:
        """Ask again for what has not come in time."""
        due = self._fetches.due
        if due is not None and self._clock() >= due:
            self._step(self._fetches.tick(self._clock()))

    def forget(self, peer: bytes) -> None:
        """A peer has gone, and needs no answer."""
        for digest, waiting in list(self._waiting.items()):
            self._waiting[digest] = {place: need for place, need in waiting.items() if place[0] != peer}

    def close(self) -> None:
        """Give up what is under way."""
        self._store.close()

    def _step(self, step: Step) -> None:
        for need in step.needs:
            self._say(need)
        for digest in step.arrived:
            for (peer, _), need in self._waiting.pop(digest, {}).items():
                self._serve(peer, need)
        for digest, error in step.lost:
            for peer, _ in self._waiting.pop(digest, {}):
                self._refuse(peer, error)

    def _serve(self, peer: bytes, need: wire.Need) -> None:
        try:
            blob, data = self._store.answer(need)
        except BlobError as error:
            if isinstance(cause := error.__cause__, OSError) and not shortage(cause):
                self._store.doubt(Digest(need.digest))  # when a peer asks again, it is removed and fetched anew
            self._refuse(peer, error)
            return
        self._send(peer, blob, (data,))

    def _refuse(self, peer: bytes, error: BlobError) -> None:
        self._send(peer, wire.Refused(reason="unknown_blob", detail=str(error)[:2048]), ())

    def _evict(self, round: int) -> None:
        old = [digest for digest, wanted in self._wanted.items() if wanted <= round - KEPT_ROUNDS]
        for digest in old:
            del self._wanted[digest]
            self._known.pop(digest, None)
        if old:
            self._store.evict(lambda digest: digest not in old)
