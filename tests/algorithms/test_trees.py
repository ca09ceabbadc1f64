"""Trees: arithmetic, arrays, wire names, and the model's digest."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import torch

from fedemu.algorithms.trees import (
    ALIGNMENT,
    add,
    declared_dtypes,
    flatten,
    from_arrays,
    gradients_of,
    model_digest,
    only,
    scale,
    squared_norm,
    subtract,
    to_arrays,
    unflatten,
    variables_of,
    without,
    zeros_like,
)
from fedemu.protocol.blobs.tree_file import decode_tree, encode_tree


def test_arrays_share_memory_with_contiguous_leaves() -> None:
    leaf = torch.arange(6.0).reshape(2, 3)
    array = to_arrays({"w": leaf})["w"]
    leaf[0, 0] = 7.0
    assert array.tolist() == [[7.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_arrays_of_any_layout_come_in_c_order() -> None:
    images = torch.arange(24.0).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    array = to_arrays({"w": images})["w"]
    assert array.flags.c_contiguous
    assert array.ravel().tolist() == list(range(24))


def test_bfloat16_travels_as_the_bits_of_uint16() -> None:
    array = to_arrays({"w": torch.tensor([1.0, -2.0], dtype=torch.bfloat16)})["w"]
    assert array.dtype == np.uint16
    assert array.tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize("shape", [(2,), (), (0, 3), (2, 35)])
def test_a_tree_comes_back_from_its_file_with_its_dtypes(shape: tuple[int, ...]) -> None:
    tree = {"half": torch.full(shape, -1.5, dtype=torch.bfloat16), "odd": torch.ones(3, dtype=torch.float16)}
    back = from_arrays(decode_tree(encode_tree(to_arrays(tree), declared_dtypes(tree))))
    assert {name: leaf.dtype for name, leaf in back.items()} == {"half": torch.bfloat16, "odd": torch.float16}
    assert all(torch.equal(back[name], leaf) for name, leaf in tree.items())


def test_tensors_lie_over_aligned_arrays_even_if_read_only() -> None:
    memory = np.zeros(64, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    array = memory[start : start + 8].view(np.float32)
    view = array.view()
    view.flags.writeable = False
    tensor = from_arrays({"w": view})["w"]
    array[0] = 5.0
    assert tensor.tolist() == [5.0, 0.0]


def test_misaligned_and_foreign_arrays_are_copied() -> None:
    memory = np.zeros(128, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT + 4
    misaligned = memory[start : start + 8].view(np.float32)
    assert from_arrays({"w": misaligned})["w"].data_ptr() != misaligned.ctypes.data
    assert from_arrays({"w": np.array([1.5, 2.0], ">f4")})["w"].tolist() == [1.5, 2.0]


def test_wire_names_lead_to_the_same_forest_back() -> None:
    one, two = torch.ones(1), torch.zeros(2)
    forest = {"model": {"fc1.weight": one, "block/0.bias": two}, "control": {"fc1.weight": two}}
    leaves = flatten(forest)
    assert list(leaves) == ["model/fc1.weight", "model/block/0.bias", "control/fc1.weight"]
    assert unflatten(leaves) == forest


def test_the_model_digest_is_over_sorted_names_dtypes_shapes_and_bytes() -> None:
    variables = {"w": torch.tensor([[1.0, 2.0]]), "b": torch.tensor(7)}
    expected = hashlib.sha256(
        b'["b","int64",[]]\n' + struct.pack("<q", 7) + b'["w","float32",[1,2]]\n' + struct.pack("<2f", 1.0, 2.0)
    )
    assert model_digest(variables) == expected.hexdigest()
    assert model_digest(dict(reversed(variables.items()))) == expected.hexdigest()


def test_the_model_digest_does_not_see_memory_layout_or_gradients() -> None:
    weight = torch.arange(24.0).reshape(1, 2, 3, 4)
    strided = weight.clone(memory_format=torch.channels_last).requires_grad_()
    assert model_digest({"w": strided}) == model_digest({"w": weight})


@pytest.mark.parametrize(
    "other",
    [
        {"v": torch.zeros(4)},
        {"w": torch.zeros(2, 2)},
        {"w": torch.zeros(4, dtype=torch.int32)},
        {"w": torch.tensor([0.0, 0.0, 0.0, -0.0])},
        {},
    ],
)
def test_the_model_digest_sees_names_shapes_dtypes_and_every_bit(other: dict[str, torch.Tensor]) -> None:
    assert model_digest(other) != model_digest({"w": torch.zeros(4)})


def test_bfloat16_has_a_digest_of_its_own_bits() -> None:
    value = torch.tensor([1.0], dtype=torch.bfloat16)
    expected = hashlib.sha256(b'["w","bfloat16",[1]]\n' + b"\x80\x3f").hexdigest()
    assert model_digest({"w": value}) == expected
    assert model_digest({"w": value.reshape(())}) != expected


def test_arithmetic_goes_leaf_by_leaf() -> None:
    left = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(3)}
    right = {"n": torch.tensor(1), "w": torch.tensor([0.5, 4.0])}
    assert {k: v.tolist() for k, v in add(left, right).items()} == {"w": [1.5, 6.0], "n": 4}
    assert {k: v.tolist() for k, v in subtract(left, right).items()} == {"w": [0.5, -2.0], "n": 2}
    assert scale({"w": torch.tensor([1.0, 2.0])}, 0.5)["w"].tolist() == [0.5, 1.0]
    assert zeros_like(left)["w"].tolist() == [0.0, 0.0]
    assert float(squared_norm({"w": torch.tensor([3.0, 4.0]), "b": torch.tensor(1.0)})) == 26.0
    assert float(squared_norm({"w": torch.tensor([2.0**13 + 2.0**-13], dtype=torch.float64)})) == 2.0**26 + 2 + 2.0**-26


@pytest.mark.parametrize("value", [300.0, 2.0**-14])
def test_squares_of_half_precision_are_added_in_single_precision(value: float) -> None:
    tree = {"w": torch.full((3,), value, dtype=torch.float16)}
    assert float(squared_norm(tree)) == 3 * value**2, "float16 knows neither so large nor so small squares"


def test_a_difference_of_truth_values_says_where_they_differ() -> None:
    mask, other = torch.tensor([True, False]), torch.tensor([True, True])
    assert subtract({"m": mask}, {"m": other})["m"].tolist() == [False, True]


def test_a_sum_undoes_a_difference_of_truth_values() -> None:
    before = {"m": torch.tensor([True, True, False, False])}
    after = {"m": torch.tensor([False, True, True, False])}
    assert torch.equal(add(before, subtract(after, before))["m"], after["m"])


def test_leaves_are_picked_by_name_in_the_trees_order() -> None:
    tree = {"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)}
    assert list(only(tree, frozenset({"c", "a"}))) == ["a", "c"]
    assert list(without(tree, frozenset({"a"}))) == ["b", "c"]


def test_gradients_are_those_by_new_variables_and_0_by_one_that_does_not_matter() -> None:
    tree = {"w": torch.tensor([1.0, 2.0]), "unused": torch.tensor([3.0])}
    variables = variables_of(tree)
    found = gradients_of(variables["w"].square().sum(), variables)
    assert {name: leaf.tolist() for name, leaf in found.items()} == {"w": [2.0, 4.0], "unused": [0.0]}
    assert not any(leaf.requires_grad for leaf in tree.values())
