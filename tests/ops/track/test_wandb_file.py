"""The records of a file of Weights & Biases, up to where its process was killed."""

from __future__ import annotations

import struct
import zlib

from fedemu.ops.track.wandb_file import records

HEADER = b":W&B\xe1\xbe\x00"


def chunk(kind: int, content: bytes) -> bytes:
    return struct.pack("<IHB", zlib.crc32(bytes([kind]) + content), len(content), kind) + content


def test_a_record_may_go_over_the_end_of_a_block_and_one_that_was_cut_off_is_left_out() -> None:
    first = bytes(2**15 - len(HEADER) - 2 * 7 - 1)
    log = HEADER + chunk(1, first) + chunk(2, b"a")
    assert len(log) == 2**15
    log += chunk(3, b"b") + chunk(4, b"cd") + chunk(1, b"last")
    assert [*records(log)] == [first, b"abcd", b"last"]
    assert [*records(log[:-1])] == [first, b"abcd"]
    assert [*records(log[:-12])] == [first]
    assert [*records(HEADER)] == [*records(b"")] == []


def test_a_block_whose_end_has_no_room_for_a_chunk_is_followed_by_the_next_block() -> None:
    first = bytes(2**15 - len(HEADER) - 7 - 6)
    assert [*records(HEADER + chunk(1, first) + bytes(6) + chunk(1, b"next"))] == [first, b"next"]


def test_a_log_ends_before_a_record_that_is_damaged() -> None:
    damaged = chunk(1, b"two")[:-1] + b"?"
    assert [*records(HEADER + chunk(1, b"one") + damaged + chunk(1, b"three"))] == [b"one"]
    assert [*records(HEADER + chunk(1, b"one") + bytes(50))] == [b"one"], "zeros of a disk that lost its power"
