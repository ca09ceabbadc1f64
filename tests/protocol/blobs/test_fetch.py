"""Fetching blobs: few chunks ahead, asked again when lost, given up when broken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fedemu.protocol.blobs.downloads import CHUNK
from fedemu.protocol.blobs.fetch import FIRST, LEAST, MOST_WAITS, PATIENCE, TRIES, WINDOW, Fetches
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.errors import UnwritableError
from fedemu.protocol.ids import digest_of
from fedemu.protocol.messages import Blob, BlobRef, Need

DATA = bytes(range(256)) * (6 * CHUNK // 256) + b"tail"
REF = BlobRef(key="model", digest=digest_of(DATA), size=len(DATA))


def chunk(need: Need, data: bytes = DATA) -> tuple[Blob, bytes]:
    part = data[need.offset : need.offset + need.length]
    return Blob(digest=need.digest, offset=need.offset, size=len(data)), part


@pytest.fixture
def fetches(tmp_path: Path) -> Fetches:
    return Fetches(BlobStore(tmp_path))


def test_a_blob_is_fetched_a_few_chunks_ahead_until_it_is_whole(fetches: Fetches, tmp_path: Path) -> None:
    queue = fetches.want(REF, 0.0).needs
    assert [need.offset for need in queue] == [place * FIRST for place in range(WINDOW)]
    arrived = []
    while queue:
        step = fetches.receive(*chunk(queue.pop(0)), 1.0)
        queue += step.needs
        arrived += step.arrived
        assert len(queue) <= WINDOW
    assert arrived == [REF.digest]
    assert (tmp_path / REF.digest).read_bytes() == DATA
    assert fetches.due is None


def test_what_is_here_or_under_way_is_not_asked_for_again(fetches: Fetches, tmp_path: Path) -> None:
    BlobStore(tmp_path).put(b"here")
    here = BlobRef(key="k", digest=digest_of(b"here"), size=4)
    assert fetches.want(here, 0.0) == ([], [here.digest], [])
    fetches.want(REF, 0.0)
    assert fetches.want(REF, 0.0).needs == []


def test_a_blob_that_may_have_been_refused_is_asked_for_again_when_it_is_wanted_anew(fetches: Fetches) -> None:
    asked = fetches.want(REF, 0.0).needs
    fetches.refused()
    assert fetches.want(REF, 1.0).needs == asked
    assert fetches.want(REF, 1.0).needs == []
    fetches.refused()
    first = fetches.receive(*chunk(asked[0]), 2.0).needs[0]
    assert first.offset > asked[-1].offset
    assert fetches.want(REF, 3.0).needs == []


@pytest.mark.parametrize("data", [b"", b"x"])
def test_a_blob_of_a_byte_or_none_is_asked_for_once(fetches: Fetches, data: bytes) -> None:
    ref = BlobRef(key="k", digest=digest_of(data), size=len(data))
    (need,) = fetches.want(ref, 0.0).needs
    assert (need.offset, need.length) == (0, 1)
    assert fetches.receive(*chunk(need, data), 0.0) == ([], [ref.digest], [])


def test_the_chunk_that_was_asked_for_first_decides_when_to_ask_again(fetches: Fetches) -> None:
    first, second = (BlobRef(key="k", digest=digest_of(data), size=1) for data in (b"x", b"y"))
    (need,) = fetches.want(first, 0.0).needs
    fetches.want(second, 3.0)
    assert fetches.due == PATIENCE
    assert fetches.tick(PATIENCE).needs == [need]
    assert fetches.due == 3.0 + PATIENCE


def test_a_blob_that_was_removed_is_fetched_anew(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    fetches, small = Fetches(store), BlobRef(key="k", digest=digest_of(b"good"), size=4)
    for _ in range(2):
        (need,) = fetches.want(small, 0.0).needs
        assert fetches.receive(*chunk(need, b"good"), 0.0).arrived == [small.digest]
        store.evict(().__contains__)


def test_a_chunk_that_does_not_come_is_asked_for_again_once_no_other_comes_either(fetches: Fetches) -> None:
    first, *rest = fetches.want(REF, 0.0).needs
    for need in rest:
        fetches.receive(*chunk(need), 4.0)
    assert fetches.due == 4.0 + PATIENCE
    assert fetches.tick(PATIENCE).needs == []
    assert first.offset in [need.offset for need in fetches.tick(4.0 + PATIENCE).needs]


def served(fetches: Fetches, queue: list[Need], rate: float, most: int) -> tuple[list[int], float]:
    """Send ``most`` chunks at ``rate`` bytes a second; their lengths in their order, and the longest time between two.

    Nothing may be asked for twice.
    """
    now, lengths, longest, asked = 0.0, [], 0.0, {need.offset for need in queue}
    while queue and len(lengths) < most:
        need = queue.pop(0)
        seconds = need.length / rate
        while (due := fetches.due) is not None and due < now + seconds:
            assert fetches.tick(due).needs == []
        now, longest = now + seconds, max(longest, seconds)
        lengths.append(need.length)
        step = fetches.receive(*chunk(need), now)
        assert step.lost == []
        assert asked.isdisjoint(need.offset for need in step.needs)
        asked.update(need.offset for need in step.needs)
        queue += step.needs
    return lengths, longest


def test_chunks_grow_on_a_quick_connection(fetches: Fetches, tmp_path: Path) -> None:
    lengths, _ = served(fetches, fetches.want(REF, 0.0).needs, 1e9, 1000)
    assert sum(lengths) == len(DATA)
    assert max(lengths) == CHUNK
    assert lengths[:12] == [FIRST] * 4 + [2 * FIRST] * 4 + [4 * FIRST] * 4
    assert (tmp_path / REF.digest).read_bytes() == DATA


def test_a_small_blob_on_a_quick_connection_makes_no_chunks_smaller(fetches: Fetches) -> None:
    small = BlobRef(key="k", digest=digest_of(b"good"), size=4)
    (need,) = fetches.want(small, 0.0).needs
    fetches.receive(*chunk(need, b"good"), 0.0)
    assert [need.length for need in fetches.want(REF, 0.0).needs] == [FIRST] * WINDOW


def test_on_a_slow_connection_chunks_are_small_and_nothing_is_asked_for_twice(fetches: Fetches) -> None:
    lengths, longest = served(fetches, fetches.want(REF, 0.0).needs, 7000.0, 30)
    assert lengths == [FIRST] * 5 + [FIRST // 2] * 4 + [LEAST] * 21
    assert longest < 2.5, "seconds without a message, after 10 of which the coordinator would count as dead"


def test_a_chunk_that_was_lost_on_a_slow_connection_is_asked_for_again_in_smaller_ones(
    fetches: Fetches, tmp_path: Path
) -> None:
    _, *rest = fetches.want(REF, 0.0).needs
    for need in rest:
        fetches.receive(*chunk(need), 3.0)
    queue = fetches.tick(3.0 + PATIENCE).needs
    assert Need(digest=REF.digest, offset=0, length=FIRST // 2) in queue
    asked = {need.offset for need in queue}
    while queue:
        needs = fetches.receive(*chunk(queue.pop(0)), 9.0).needs
        assert asked.isdisjoint(need.offset for need in needs), "nothing is asked for a third time"
        asked.update(need.offset for need in needs)
        queue += needs
    assert FIRST // 2 in asked
    assert (tmp_path / REF.digest).read_bytes() == DATA


def test_a_blob_that_never_comes_is_given_up(fetches: Fetches) -> None:
    fetches.want(REF, 0.0)
    for _ in range(MOST_WAITS):
        due = fetches.due
        assert due is not None
        assert fetches.tick(due).lost == []
    due = fetches.due
    assert due is not None
    ((digest, error),) = fetches.tick(due).lost
    assert digest == REF.digest
    assert "does not send the blob" in str(error)
    assert fetches.due is None


def test_on_a_new_connection_everything_under_way_is_asked_for_anew(fetches: Fetches) -> None:
    asked = fetches.want(REF, 0.0).needs
    assert sorted(need.offset for need in fetches.restart(1.0).needs) == [need.offset for need in asked]


def test_a_chunk_that_nobody_asked_for_is_ignored(fetches: Fetches) -> None:
    need = Need(digest=REF.digest, offset=0, length=CHUNK)
    assert fetches.receive(*chunk(need), 0.0) == ([], [], [])


def test_a_broken_blob_is_fetched_anew_and_given_up_after_some_tries(fetches: Fetches) -> None:
    small = BlobRef(key="k", digest=digest_of(b"good"), size=4)
    (need,) = fetches.want(small, 0.0).needs
    for _ in range(TRIES - 1):
        (need,) = fetches.receive(*chunk(need, b"evil"), 0.0).needs
    ((digest, error),) = fetches.receive(*chunk(need, b"evil"), 0.0).lost
    assert digest == small.digest
    assert digest[:12] in str(error)
    assert fetches.due is None


def test_a_blob_whose_chunks_are_too_short_is_given_up_and_not_waited_for(fetches: Fetches, tmp_path: Path) -> None:
    queue, lost = fetches.want(REF, 0.0).needs, []
    queue += fetches.receive(*chunk(queue.pop(0)), 1.0).needs
    assert os.listdir(tmp_path) != []
    while queue:
        blob, part = chunk(queue.pop(0))
        step = fetches.receive(blob, part[:-1], 1.0)
        queue += step.needs
        lost += step.lost
    assert [digest for digest, _ in lost] == [REF.digest]
    assert fetches.due is None
    assert os.listdir(tmp_path) == []


def test_a_disk_that_takes_no_blob_ends_the_machine_at_once(fetches: Fetches, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> int:
        raise OSError(28, "No space left on device")

    small = BlobRef(key="k", digest=digest_of(b"good"), size=4)
    (need,) = fetches.want(small, 0.0).needs
    monkeypatch.setattr(os, "pwrite", no_space)
    with pytest.raises(UnwritableError, match="the disk is full; make room there"):
        fetches.receive(*chunk(need, b"good"), 0.0)
