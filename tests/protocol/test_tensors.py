"""Arrays as specs and frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedemu.protocol.codec import ITEM_BYTES
from fedemu.protocol.errors import MalformedMessage
from fedemu.protocol.messages import TensorSpec
from fedemu.protocol.tensors import DTYPES, pack, unpack


def test_arrays_are_packed_by_name_in_c_order_little_endian() -> None:
    specs, frames = pack({"b": np.array([[1, 2], [3, 4]], dtype=">i2").T, "a": np.array(1.5, dtype=np.float32)})
    assert specs == (
        TensorSpec(name="a", dtype="float32", shape=()),
        TensorSpec(name="b", dtype="int16", shape=(2, 2)),
    )
    assert [bytes(frame).hex(" ") for frame in frames] == ["00 00 c0 3f", "01 00 03 00 02 00 04 00"]


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    specs, frames = pack({"x": array})
    array[1, 2] = 9
    received = unpack(specs, frames)["x"]
    assert received[1, 2] == 9
    assert np.shares_memory(received, array)


def test_received_arrays_cannot_be_written_to() -> None:
    received = unpack((TensorSpec(name="x", dtype="int8", shape=(3,)),), [bytearray(b"abc")])["x"]
    assert received.tolist() == [97, 98, 99]
    with pytest.raises(ValueError, match="read-only"):
        received[0] = 1


def test_empty_and_scalar_arrays_travel() -> None:
    arrays = {"empty": np.zeros((0, 3), np.float32), "scalar": np.array(True), "frozen": np.frombuffer(b"ab", np.uint8)}
    received = unpack(*pack(arrays))
    assert {name: (array.shape, array.dtype.name) for name, array in received.items()} == {
        "empty": ((0, 3), "float32"),
        "frozen": ((2,), "uint8"),
        "scalar": ((), "bool"),
    }


def test_bfloat16_travels_as_its_bits_when_it_is_declared() -> None:
    bits = np.array([0x3F80, 0xC000], dtype=np.uint16)
    specs, frames = pack({"w": bits}, {"w": "bfloat16"})
    assert specs[0].dtype == "bfloat16"
    assert unpack(specs, frames)["w"].tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize(
    ("array", "dtypes"),
    [
        (np.zeros(2, np.uint16), {}),
        (np.zeros(2, np.complex64), {}),
        (np.zeros(2, object), {}),
        (np.zeros(2, np.float32), {"x": "bfloat16"}),
        (np.zeros(2, np.float32), {"x": "float64"}),
    ],
)
def test_a_dtype_that_the_wire_does_not_carry_is_named(array: NDArray[Any], dtypes: dict[str, str]) -> None:
    with pytest.raises(MalformedMessage, match=f"'x' is {array.dtype.name}") as caught:
        pack({"x": array}, dtypes)
    assert caught.value.reason == "dtype"


def test_every_dtype_has_the_bytes_that_the_codec_expects() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


@settings(max_examples=30)
@given(
    st.dictionaries(
        st.text(max_size=5),
        hnp.arrays(
            st.sampled_from([dtype for name, dtype in DTYPES.items() if name != "bfloat16"]),
            hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
        ),
        max_size=3,
    )
)
def test_any_arrays_come_back_bit_for_bit(arrays: dict[str, NDArray[Any]]) -> None:
    received = unpack(*pack(arrays))
    assert list(received) == sorted(arrays)
    for name, array in arrays.items():
        assert (received[name].dtype, received[name].shape) == (array.dtype, array.shape)
        assert received[name].tobytes() == array.tobytes()
