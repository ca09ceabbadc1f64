"""Reducers over payloads: values worked out by hand, exact bits, and integers."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import collect, mean, total, weighted_mean
from fedemu.coordinator.asks.payload import spill
from fedemu.coordinator.asks.reduce import reduce_replies
from fedemu.protocol.messages import TensorSpec


@pytest.fixture
def payload_of(tmp_path: Path):
    """Makes the payload of a device from {wire name: tensor}."""

    def make(device: int, leaves: dict[str, torch.Tensor]):
        specs = tuple(
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in leaves.items()
        )
        raw = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in leaves.values()]
        return spill(tmp_path, device, specs, [memoryview(data) for data in raw])

    return make


@pytest.fixture
def reduced(payload_of):
    """The one leaf ``a/x`` of several devices, reduced."""

    def reduce(reducer, values, examples=None, dtype=torch.float32, **options):
        tensors = [value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype) for value in values]
        payloads = [payload_of(device, {"a/x": tensor}) for device, tensor in enumerate(tensors)]
        return reduce_replies({"a": reducer}, payloads, examples or [1] * len(payloads), **options)["a"]["x"]

    return reduce


def test_a_weighted_mean_weighs_by_examples(reduced):
    assert reduced(weighted_mean, [[1.0, 0.0], [5.0, 4.0]], [3, 1]).tolist() == [2.0, 1.0]


def test_a_mean_does_not_look_at_examples(reduced):
    assert reduced(mean, [[1.0], [5.0]], [3, 1]).tolist() == [3.0]


def test_a_total_adds(reduced):
    assert reduced(total, [[1.0], [5.0]], [3, 1]).tolist() == [6.0]


def test_the_weighted_mean_is_the_mean_if_nobody_has_examples(reduced):
    assert reduced(weighted_mean, [[1.0], [5.0]], [0, 0]).tolist() == [3.0]


def test_a_device_without_examples_does_not_count(reduced):
    assert reduced(weighted_mean, [[1.0], [5.0]], [2, 0]).tolist() == [1.0]


@pytest.mark.parametrize("reducer", [weighted_mean, mean, total])
def test_one_reply_comes_back_bit_for_bit(reduced, reducer):
    values = torch.tensor([0.1, -0.0, 1e-45, 3.4e38])
    assert reduced(reducer, [values], [7]).view(torch.int32).tolist() == values.view(torch.int32).tolist()


def test_sums_are_kept_in_float64(reduced):
    assert reduced(total, [[1e8], [1.0], [-1e8]]).tolist() == [1.0]


def test_a_sum_beyond_the_dtype_is_infinite(reduced):
    assert reduced(total, [[60000.0], [60000.0]], dtype=torch.float16).tolist() == [float("inf")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("reducer", [weighted_mean, mean, total])
def test_the_bits_do_not_depend_on_the_size_of_the_blocks(reduced, reducer, dtype):
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(1003, generator=generator, dtype=torch.float64).to(dtype) for _ in range(7)]
    examples = [13, 1, 999, 0, 77, 3, 12345]
    results = [reduced(reducer, values, examples, block=block) for block in (1, 7, 64, 1003, 16384)]
    assert results[0].dtype == dtype
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_reduction_has_the_bits_of_a_loop_in_plain_python(reduced):
    generator = torch.Generator().manual_seed(2)
    values = [torch.randn(50, generator=generator, dtype=torch.float64) for _ in range(5)]
    examples = [3, 1, 4, 1, 5]
    expected = []
    for place in range(50):
        acc = values[0][place].item() * 3.0
        for value, count in zip(values[1:], examples[1:], strict=True):
            acc = acc + value[place].item() * float(count)
        expected.append(acc / 14.0)
    assert reduced(weighted_mean, values, examples).tolist() == expected


def test_the_order_of_the_payloads_decides_the_last_bits(reduced):
    values = [[1.0], [2.0**-53], [2.0**-53]]
    assert reduced(total, values, dtype=torch.float64).tolist() == [1.0]
    assert reduced(total, values[::-1], dtype=torch.float64).tolist() == [1.0 + 2.0**-52]


def test_shapes_and_several_leaves_survive(payload_of):
    leaves = [{"m/w": torch.full((2, 3), float(k)), "m/n": torch.tensor(k), "o/v": torch.ones(0)} for k in (1, 3)]
    payloads = [payload_of(device, each) for device, each in enumerate(leaves)]
    result = reduce_replies({"m": mean, "o": total}, payloads, [1, 1])
    assert result["m"]["w"].tolist() == [[2.0] * 3] * 2
    assert result["m"]["n"].tolist() == 2
    assert result["m"]["n"].dtype == torch.int64
    assert result["o"]["v"].shape == (0,)


def test_keys_that_nobody_asked_to_reduce_are_left_out(payload_of):
    payload = payload_of(0, {"m/w": torch.ones(1), "model/w": torch.zeros(1)})
    assert list(reduce_replies({"m": mean}, [payload], [1])) == ["m"]
    assert list(reduce_replies({"m": mean}, [payload], [1])["m"]) == ["w"]


def test_a_mean_of_integers_is_rounded_half_to_even(reduced):
    assert reduced(mean, [[1, 2, 5], [2, 3, 5]], dtype=torch.int32).tolist() == [2, 2, 5]


def test_a_mean_of_the_largest_integers_stays_in_range(reduced):
    top = 2**63 - 1
    assert reduced(mean, [[top, -top - 1]], dtype=torch.int64).tolist()[0] > 0
    assert reduced(mean, [[255], [255]], dtype=torch.uint8).tolist() == [255]


def test_a_total_of_integers_is_exact_beyond_what_floats_hold(reduced):
    assert reduced(total, [[2**60 + 1], [2**60]], dtype=torch.int64).tolist() == [2**61 + 1]


def test_a_total_of_integers_saturates(reduced):
    top = 2**63 - 1
    assert reduced(total, [[top, -top], [top, -top]], dtype=torch.int64).tolist() == [top, -top - 1]
    assert reduced(total, [[200], [200]], dtype=torch.uint8).tolist() == [255]
    assert reduced(total, [[-100], [-100]], dtype=torch.int8).tolist() == [-128]


def test_bools_vote_in_a_mean_and_any_true_makes_a_total(reduced):
    votes = [[True, True, False], [True, False, False], [True, False, False]]
    assert reduced(mean, votes, dtype=torch.bool).tolist() == [True, False, False]
    assert reduced(total, votes, dtype=torch.bool).tolist() == [True, True, False]


def test_collect_gives_a_handle_per_device_in_the_given_order(payload_of):
    payloads = [payload_of(device, {"m/w": torch.full((2,), float(device))}) for device in (9, 4)]
    handles = reduce_replies({"m": collect}, payloads, [1, 1])["m"]
    for payload in payloads:
        payload.discard()
    assert [handle.device for handle in handles] == [9, 4]
    assert [handle.load()["w"].tolist() for handle in handles] == [[9.0, 9.0], [4.0, 4.0]]


def test_one_key_can_be_reduced_in_two_ways(payload_of):
    payloads = [payload_of(device, {"m/x": torch.tensor([float(device)])}) for device in (4, 2)]
    reply = reduce_replies({"m": weighted_mean, "each": collect.of("m")}, payloads, [3, 1])
    assert reply["m"]["x"].tolist() == [3.5]
    assert [handle.load()["x"].tolist() for handle in reply["each"]] == [[4.0], [2.0]]


def test_payloads_in_files_fold_like_payloads_in_memory(payload_of):
    generator = np.random.default_rng(3)
    large = [torch.from_numpy(generator.standard_normal(2**18 + 1, dtype=np.float32)) for _ in range(3)]
    in_files = reduce_replies({"m": mean}, [payload_of(k, {"m/w": x}) for k, x in enumerate(large)], [1] * 3)
    in_memory = reduce_replies({"m": mean}, [payload_of(k, {"m/w": x[:100]}) for k, x in enumerate(large)], [1] * 3)
    assert torch.equal(in_files["m"]["w"][:100], in_memory["m"]["w"])


def test_a_result_can_be_written_to_and_is_its_own(payload_of):
    payload = payload_of(0, {"m/w": torch.ones(3)})
    result = reduce_replies({"m": mean}, [payload], [1])["m"]["w"]
    result.zero_()
    assert payload.load()["m/w"].tolist() == [1.0, 1.0, 1.0]


def test_nothing_to_reduce_is_an_error(payload_of):
    with pytest.raises(ValueError, match="0 payloads"):
        reduce_replies({"m": mean}, [], [])
    with pytest.raises(ValueError, match="'other'"):
        reduce_replies({"other": mean}, [payload_of(0, {"m/w": torch.ones(1)})], [1])
