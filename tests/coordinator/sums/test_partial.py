"""Exact sums: held against fractions, in any order and on any tree, for every dtype and every reducer."""

import math
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedemu.algorithms.interface import Reducer, collect, mean, total, weighted_mean
from fedemu.coordinator.sums.digits import Digits, Packed
from fedemu.coordinator.sums.leaf import Leaf, widened
from fedemu.coordinator.sums.partial import PackedPartial, Partial
from fedemu.coordinator.sums.terms import ELEMENTS
from fedemu.protocol.tensors import DTYPES

REDUCERS = (weighted_mean, mean, total)
PRECISION = {"float64": (53, -1022), "float32": (24, -126), "float16": (11, -14), "bfloat16": (8, -126)}


def empty(reducer: Reducer, dtype: str = "float32", size: int = 1) -> Partial:
    return Partial({"a": reducer}, {"a/x": Leaf(dtype, (size,))})


def reduced(reducer: Reducer, values: Any, examples: list[int] | None = None, dtype: str = "float32") -> list[Any]:
    arrays = [np.array(value, DTYPES[dtype]) for value in values]
    sums = empty(reducer, dtype, len(arrays[0]))
    sums.fold([{"a/x": array} for array in arrays], examples or [1] * len(arrays))
    found = sums.finish()["a"]["x"].tolist()
    assert sums.unpack(sums.pack()).finish()["a"]["x"].tolist() == found
    return found


def numbers(array: NDArray[Any], dtype: str) -> list[Fraction]:
    return [Fraction(value) for value in (widened(array) if dtype == "bfloat16" else array).tolist()]


def nearest(value: Fraction, dtype: str) -> float:
    """The number of the dtype that is nearest, ties to even: by the definition, without any float arithmetic."""
    precision, smallest = PRECISION[dtype]
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, smallest) - precision + 1)
    found = round(value / unit) * unit
    return math.copysign(math.inf, found) if dtype == "float16" and abs(found) > 65504 else float(found)


def awkward(generator: np.random.Generator, dtype: str, size: int) -> NDArray[Any]:
    """Finite numbers of all sizes: random bits, subnormal ones, both zeros, and ones of similar size."""
    width = DTYPES[dtype].itemsize
    array = np.frombuffer(generator.bytes(width * size), DTYPES[dtype]).copy()
    usual = generator.standard_normal(size).astype(np.float32 if dtype == "bfloat16" else DTYPES[dtype])
    array[::3] = (usual.view(np.uint32) >> 16 if dtype == "bfloat16" else usual)[::3]
    array[1::7] = 1 if dtype == "bfloat16" else -np.finfo(DTYPES[dtype]).smallest_subnormal
    array[2::7] = 0x8000 if dtype == "bfloat16" else -0.0
    with np.errstate(over="ignore", invalid="ignore"):
        large = ~(np.abs((widened(array) if dtype == "bfloat16" else array).astype(np.float64)) < 1e30)
    array[large] = 0
    return array


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("reducer", REDUCERS)
@pytest.mark.parametrize("largest", [2, 1000, 2**53 - 1])
def test_every_result_is_the_exact_one_rounded_once(reducer, dtype, largest):
    generator = np.random.default_rng([largest % 97, PRECISION[dtype][0]])
    arrays = [awkward(generator, dtype, 60) for _ in range(20)]
    arrays[4:6] = [arrays[3] ^ 0x8000 if dtype == "bfloat16" else -arrays[3], arrays[3]]
    examples = [int(count) for count in generator.integers(0, largest, 20)]
    sums = empty(reducer, dtype, 60)
    sums.fold([{"a/x": array} for array in arrays], examples)
    weights = examples if reducer.kind == "weighted_mean" else [1] * 20
    exact = [
        sum((weight * value for weight, value in zip(weights, column, strict=True)), Fraction(0))
        / (1 if reducer.kind == "total" else sum(weights))
        for column in zip(*(numbers(array, dtype) for array in arrays), strict=True)
    ]
    found = sums.finish()["a"]["x"]
    assert (widened(found) if dtype == "bfloat16" else found).tolist() == [nearest(value, dtype) for value in exact]


SUBNORMAL = product(("float32", "float16", "bfloat16"), ("largest subnormal", "smallest subnormal"))


@pytest.mark.parametrize(("dtype", "place"), [*product(PRECISION, ["normal"]), *SUBNORMAL])
def test_a_mean_that_lies_just_beside_the_middle_of_two_numbers_is_rounded_to_its_own_side(dtype, place):
    precision, smallest = PRECISION[dtype]
    unit = 1.0 if place == "normal" else 2.0 ** (smallest - precision + 1)
    even = {"normal": 2 ** (precision - 1), "largest subnormal": 2 ** (precision - 2), "smallest subnormal": 2}[place]
    for sign in (1, -1):
        steps = sign * unit * np.array([even, even + 1, even + 2, even + 1], np.float64)
        bits = steps.astype(np.float32).view(np.uint32) >> 16
        values = bits.astype(np.uint16) if dtype == "bfloat16" else steps.astype(DTYPES[dtype])
        # float64 cannot tell these means from the middle, which would be rounded to the even number of the two.
        nearer = reduced(weighted_mean, [values[[0, 2]], values[[1, 3]]], [2**45, 2**45 + 1], dtype)
        assert nearer == values[[1, 3]].tolist()
        nearer = reduced(weighted_mean, [values[[0, 1]], values[[1, 0]]], [2**45 + 1, 2**45], dtype)
        assert nearer == values[[0, 1]].tolist()


@pytest.mark.parametrize("reducer", REDUCERS)
def test_every_order_and_every_tree_gives_the_same_bits(reducer):
    generator = np.random.default_rng(4)
    size = 2 * ELEMENTS + 3  # three blocks of payloads, and two of digits
    arrays = [awkward(generator, "float32", size) for _ in range(21)]
    examples = [int(count) for count in generator.integers(0, 3, 21)]
    whole = empty(reducer, "float32", size)
    whole.fold([{"a/x": array} for array in arrays], examples)
    slices = [reduced(reducer, [array[k : k + 683] for array in arrays], examples) for k in range(0, size, 683)]
    assert whole.finish()["a"]["x"].tolist() == [value for each in slices for value in each]
    for _ in range(3):
        order = generator.permutation(21)
        parts = [empty(reducer, "float32", size) for _ in range(5)]
        for part, members in zip(parts, np.split(order, [1, 2, 2, 9]), strict=True):
            for half in np.array_split(members, 2):
                part.fold([{"a/x": arrays[k]} for k in half], [examples[k] for k in half])
        while len(parts) > 1:
            last = parts.pop(int(generator.integers(len(parts))))
            parts[int(generator.integers(len(parts)))].merge(last.unpack(last.pack()))
        assert same(parts[0].pack(), whole.pack())
        assert parts[0].finish()["a"]["x"].tobytes() == whole.finish()["a"]["x"].tobytes()


@pytest.mark.parametrize("members", [1, 2, 17])
def test_a_single_payload_of_widely_spread_float64_numbers_is_not_rounded(members):
    generator = np.random.default_rng(members)
    arrays = [generator.standard_normal(1000) * 10.0 ** generator.integers(-9, 9, 1000) for _ in range(members)]
    apart, together = empty(total, "float64", 1000), empty(total, "float64", 1000)
    together.fold([{"a/x": array} for array in arrays], [1] * members)
    for array in arrays:
        apart.fold([{"a/x": array}], [1])
    exact = [sum(column, Fraction(0)) for column in zip(*(numbers(array, "float64") for array in arrays), strict=True)]
    assert same(apart.pack(), together.pack())
    assert apart.finish()["a"]["x"].tolist() == [nearest(value, "float64") for value in exact]


def same(one: PackedPartial, other: PackedPartial) -> bool:
    left, right = one.sums["a/x"], other.sums["a/x"]
    counts = (one.replies, one.examples, left.lowest) == (other.replies, other.examples, right.lowest)
    return counts and np.array_equal(left.digits, right.digits)


def test_thousands_of_the_largest_terms_do_not_overflow():
    apart, whole = [Digits(1) for _ in range(10)], Digits(1)
    for part in (*apart, *[whole] * 10):
        for _ in range(250):
            part.add(np.array([2**53]), 32, 0)
            part.added(1)
    for part in apart:
        whole.merge(part)
    lowest, digits = whole.pack()
    assert sum(int(row[0]) << 32 * place for place, row in enumerate(digits, lowest)) == 5000 << (53 + 32)
    replies, value = empty(weighted_mean, "float64"), np.array([(2.0**51 - 1) * 2**32])
    for _ in range(2000):
        replies.fold([{"a/x": value}], [3])
    assert replies.finish()["a"]["x"] == value


def test_digits_of_every_block_are_carried():
    sums = Digits(8194)
    for _ in range(300):
        sums.add(np.array([2**53, -1, 3]), 32, 8191)
        sums.added(1)
    lowest, digits = sums.pack()
    values = [sum(int(digit) << 32 * place for place, digit in enumerate(column, lowest)) for column in digits.T]
    assert values == [0] * 8191 + [300 << 85, -300 << 32, 900 << 32]


def test_the_size_of_a_packed_sum_does_not_depend_on_the_number_of_replies():
    generator = np.random.default_rng(5)
    shapes = []
    for replies in (40, 4000):
        sums = empty(mean, "float32", 50)
        sums.fold([{"a/x": generator.standard_normal(50, np.float32)} for _ in range(replies)], [1] * replies)
        shapes.append(sums.pack().sums["a/x"].digits.shape)
    assert shapes[0] == shapes[1] <= (4, 50)


@pytest.mark.parametrize("groups", [[0, 0], [0, 2], [2, 0]])
def test_replies_without_examples_count_only_if_no_reply_has_any(groups):
    sums, one = [empty(weighted_mean), empty(weighted_mean)], empty(weighted_mean)
    for part, count in zip(sums, groups, strict=True):
        replies = [{"a/x": np.array([1.0 + count], np.float32)}, {"a/x": np.array([5.0], np.float32)}]
        part.fold(replies, [count, 0])
        one.fold(replies, [count, 0])
    sums[0].merge(sums[1])
    assert sums[0].finish()["a"]["x"].tolist() == one.finish()["a"]["x"].tolist() == [3.0]


def test_an_empty_sum_changes_nothing_and_has_no_value():
    sums = empty(weighted_mean)
    with pytest.raises(ValueError, match="0 payloads"):
        sums.finish()
    sums.fold([{"a/x": np.array([2.0], np.float32)}], [0])
    sums.merge(empty(weighted_mean))
    assert sums.finish()["a"]["x"].tolist() == [2.0]


def test_what_is_collected_is_not_added_up():
    sums = Partial({"a": collect, "b": total}, {"a/x": Leaf("float32", (1,)), "b/x": Leaf("float32", (1,))})
    sums.fold([{"a/x": np.array([2.0], np.float32), "b/x": np.array([3.0], np.float32)}], [1])
    assert sums.pack().sums.keys() == {"b/x"}


def test_a_packed_sum_of_other_tensors_is_refused():
    packed = empty(total, size=3).pack()
    with pytest.raises(ValueError, match="3\\), for 4 elements"):
        empty(total, size=4).unpack(packed)
    with pytest.raises(ValueError, match="'b/x'"):
        empty(total).unpack(PackedPartial(1, 1, {"a/x": packed.sums["a/x"], "b/x": packed.sums["a/x"]}))


@pytest.mark.parametrize(
    ("dtype", "lowest", "sentence"),
    [("float32", 40, "1 places from 40 on"), ("float64", -41, "1 places from -41 on"), ("int8", -1, "below the point")],
)
def test_a_packed_sum_with_impossible_places_is_refused(dtype, lowest, sentence):
    with pytest.raises(ValueError, match=sentence):
        empty(total, dtype).unpack(PackedPartial(1, 1, {"a/x": Packed(lowest, np.ones((1, 1), np.int32))}))


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("lowest", [-40, -30, -5, 0, 27, 38])
def test_any_packed_sum_has_a_value(dtype, lowest):
    digits = np.random.default_rng(6).integers(-(2**31), 2**31, (2, 50)).astype(np.int32)
    sums = empty(mean, dtype, 50).unpack(PackedPartial(7, 0, {"a/x": Packed(lowest, digits)}))
    found = sums.finish()["a"]["x"]
    exact = [Fraction(2) ** (32 * lowest) * (int(low) + (int(high) << 32)) / 7 for low, high in digits.T]
    assert not np.isnan(widened(found) if dtype == "bfloat16" else found).any()
    if lowest in (-5, 0) and dtype != "float16":
        assert (widened(found) if dtype == "bfloat16" else found).tolist() == [nearest(value, dtype) for value in exact]


def test_values_worked_out_by_hand():
    assert reduced(weighted_mean, [[1.0, 0.0], [5.0, 4.0]], [3, 1]) == [2.0, 1.0]
    assert reduced(mean, [[1.0], [5.0]], [3, 1]) == [3.0]
    assert reduced(total, [[1.0], [5.0]], [3, 1]) == [6.0]
    assert reduced(weighted_mean, [[1.0], [5.0]], [2, 0]) == [1.0]
    assert reduced(total, [[1e8], [1.0], [-1e8]]) == [1.0]


def test_a_sum_of_zeros_is_positive():
    assert np.signbit(reduced(mean, [[-0.0], [-0.0]])).tolist() == [False]


def test_a_sum_beyond_the_dtype_is_infinite():
    assert reduced(total, [[60000.0], [60000.0]], dtype="float16") == [float("inf")]
    assert reduced(total, [[-3e38], [-3e38]]) == [-float("inf")]


def test_a_mean_of_integers_is_rounded_half_to_even():
    assert reduced(mean, [[1, 2, 5, -1, -3], [2, 3, 5, -2, -4]], dtype="int32") == [2, 2, 5, -2, -4]


def test_a_mean_of_the_largest_integers_stays_in_range():
    top = 2**63 - 1
    assert reduced(mean, [[top, -top - 1], [top, -top - 1]], dtype="int64") == [top, -top - 1]
    assert reduced(weighted_mean, [[top], [top - 1]], [2**52, 2**52], dtype="int64") == [top - 1]
    assert reduced(mean, [[255], [255]], dtype="uint8") == [255]


def test_a_total_of_integers_is_exact_and_saturates_only_at_the_end():
    top = 2**63 - 1
    assert reduced(total, [[2**60 + 1], [2**60]], dtype="int64") == [2**61 + 1]
    assert reduced(total, [[top, -top], [top, -top], [-top, -top]], dtype="int64") == [top, -top - 1]
    assert reduced(total, [[-top], [0]], dtype="int64") == [-top]
    assert reduced(mean, [[-top], [-top - 1]], dtype="int64") == [-top - 1]
    assert reduced(total, [[200], [200]], dtype="uint8") == [255]
    assert reduced(total, [[-100], [-100], [100]], dtype="int8") == [-100]


def test_bools_vote_in_a_mean_and_any_true_makes_a_total():
    votes = [[True, True, False], [True, False, False], [True, False, False]]
    assert reduced(mean, votes, dtype="bool") == [True, False, False]
    assert reduced(total, votes, dtype="bool") == [True, True, False]
