"""Planned damage to results: each kind is what it says, and leaves the original alone."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from msgspec.structs import replace

from fedemu.device.behaviour.corruption import corrupt
from fedemu.device.behaviour.faults import Corruption
from fedemu.protocol.messages import Result, TensorSpec

SPECS = (
    TensorSpec(name="a", dtype="int64", shape=(1,)),
    TensorSpec(name="b", dtype="float32", shape=(2, 2)),
    TensorSpec(name="c", dtype="float16", shape=(3,)),
)
FRAMES = [np.array([5]).tobytes(), np.ones((2, 2), np.float32).tobytes(), np.ones(3, np.float16).tobytes()]
RESULT = Result(ask="1.0.0", examples=1, steps=1, metrics={}, tensors=SPECS)


def test_nan_fills_the_first_floats() -> None:
    result, frames = corrupt(RESULT, FRAMES, "nan")
    assert result == RESULT
    assert [frames[0], frames[2]] == [FRAMES[0], FRAMES[2]]
    assert np.isnan(np.frombuffer(frames[1], np.float32)).all()
    assert len(frames[1]) == 16


def test_nan_is_nan_in_half_precision_too() -> None:
    half = replace(RESULT, tensors=(TensorSpec(name="a", dtype="float16", shape=(1,)),))
    _, frames = corrupt(half, [b"\0\0"], "nan")
    assert np.isnan(np.frombuffer(frames[0], np.float16)).all()


def test_a_wrong_shape_still_agrees_with_its_frame() -> None:
    result, frames = corrupt(RESULT, FRAMES, "shape")
    assert result == replace(RESULT, tensors=(replace(SPECS[0], shape=(2,)), *SPECS[1:]))
    assert frames == [FRAMES[0] + bytes(8), *FRAMES[1:]]


def test_truncation_halves_the_last_frame() -> None:
    result, frames = corrupt(RESULT, FRAMES, "truncate")
    assert result == RESULT
    assert frames == [*FRAMES[:2], FRAMES[2][:3]]


def test_a_payload_without_floats_or_without_tensors_is_damaged_in_shape() -> None:
    whole = replace(RESULT, tensors=SPECS[:1])
    assert corrupt(whole, FRAMES[:1], "nan")[0].tensors[0].shape == (2,)
    empty = replace(RESULT, tensors=())
    result, frames = corrupt(empty, [], "nan")
    assert [spec.shape for spec in result.tensors] == [(1,)]
    assert frames == [b"\0"]


def test_a_tensor_without_elements_is_not_the_one_that_is_damaged() -> None:
    hollow = TensorSpec(name="c", dtype="float32", shape=(0,))
    result, frames = corrupt(replace(RESULT, tensors=(hollow, *SPECS)), [b"", *FRAMES], "nan")
    assert frames == [b"", FRAMES[0], b"\xff" * 16, FRAMES[2]]
    result, frames = corrupt(replace(RESULT, tensors=(*SPECS, hollow)), [*FRAMES, b""], "truncate")
    assert [spec.shape for spec in result.tensors] == [(2,), (2, 2), (3,), (0,)]
    assert frames == [FRAMES[0] + bytes(8), *FRAMES[1:], b""]


@pytest.mark.parametrize("kind", get_args(Corruption))
def test_the_memory_of_the_frames_given_is_not_changed(kind: Corruption) -> None:
    given = [bytearray(frame) for frame in FRAMES]
    _, damaged = corrupt(RESULT, given, kind)
    assert damaged != FRAMES
    assert given == FRAMES
    assert corrupt(RESULT, [memoryview(frame) for frame in FRAMES], kind)[1] == damaged
