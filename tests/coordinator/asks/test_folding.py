"""The payloads of an ask become its reply: sums while they come, handles at the end."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedemu.algorithms.interface import collect, mean, total, weighted_mean
from fedemu.coordinator.asks.folding import Folding
from fedemu.coordinator.asks.payload import Payload, spill
from fedemu.coordinator.sums.terms import PAYLOADS
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.messages import TensorSpec


async def at_once(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


@pytest.fixture
def payload_of(tmp_path: Path):
    """Makes the payload of a device from {wire name: tensor}."""

    def make(device: int, leaves: dict[str, torch.Tensor]) -> Payload:
        specs = tuple(
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in leaves.items()
        )
        raw = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in leaves.values()]
        return spill(tmp_path, device, specs, [memoryview(data) for data in raw])

    return make


async def reduced(reducers, payloads, examples, **options):
    folding = Folding(reducers, payloads[0].leaves, at_once, **options)
    for payload, count in zip(payloads, examples, strict=True):
        folding.take(payload, count)
    return await folding.values(payloads)


async def test_shapes_and_several_leaves_survive(payload_of):
    leaves = [{"m/w": torch.full((2, 3), float(k)), "m/n": torch.tensor(k), "o/v": torch.ones(0)} for k in (1, 3)]
    result = await reduced({"m": mean, "o": total}, [payload_of(k, each) for k, each in enumerate(leaves)], [1, 1])
    assert result["m"]["w"].tolist() == [[2.0] * 3] * 2
    assert result["m"]["n"].tolist() == 2
    assert result["m"]["n"].dtype == torch.int64
    assert result["o"]["v"].shape == (0,)


async def test_keys_that_nobody_asked_to_reduce_are_left_out(payload_of):
    result = await reduced({"m": mean}, [payload_of(0, {"m/w": torch.ones(1), "model/w": torch.zeros(1)})], [1])
    assert (list(result), list(result["m"])) == (["m"], ["w"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.bool])
async def test_a_leaf_keeps_its_dtype(payload_of, dtype):
    payloads = [payload_of(k, {"m/w": torch.tensor([0, 1], dtype=dtype)}) for k in range(3)]
    leaf = (await reduced({"m": weighted_mean}, payloads, [1, 2, 3]))["m"]["w"]
    assert (leaf.dtype, leaf.tolist()) == (dtype, [0, 1])


async def test_payloads_are_folded_while_others_are_awaited_and_discarded_then(payload_of):
    payloads = [payload_of(k, {"m/w": torch.tensor([float(k)])}) for k in range(PAYLOADS + 1)]
    folding = Folding({"m": total}, payloads[0].leaves, at_once)
    for payload in payloads:
        folding.take(payload, 1)
    await asyncio.sleep(0)
    for payload in payloads[:PAYLOADS]:
        with pytest.raises(ValueError, match="discarded"):
            payload.load()
    assert payloads[PAYLOADS].load()["m/w"].tolist() == [PAYLOADS]
    result = await folding.values(payloads)
    assert result["m"]["w"].tolist() == [PAYLOADS * (PAYLOADS + 1) / 2]


async def test_large_payloads_are_folded_before_there_are_many(payload_of, monkeypatch):
    monkeypatch.setattr("fedemu.coordinator.asks.folding.MOST_WAITING", 16)
    payloads = [payload_of(k, {"m/w": torch.tensor([float(k), 1.0])}) for k in range(3)]
    folding = Folding({"m": total}, payloads[0].leaves, at_once)
    for payload in payloads:
        folding.take(payload, 1)
    await asyncio.sleep(0)
    for payload in payloads[:2]:
        with pytest.raises(ValueError, match="discarded"):
            payload.load()
    assert payloads[2].load()["m/w"].tolist() == [2.0, 1.0]
    assert (await folding.values(payloads))["m"]["w"].tolist() == [3.0, 3.0]


async def test_payloads_are_kept_for_handles_and_on_request(payload_of):
    payloads = [payload_of(device, {"m/x": torch.tensor([float(device)])}) for device in (4, 2)]
    reply = await reduced({"m": weighted_mean, "each": collect.of("m")}, payloads, [3, 1])
    assert reply["m"]["x"].tolist() == [3.5]
    await reduced({"m": mean}, payloads, [3, 1], keep=True)
    assert payloads[0].load()["m/x"].tolist() == [4.0]


async def test_collect_gives_a_handle_per_device_in_the_given_order(payload_of):
    payloads = [payload_of(device, {"m/w": torch.full((2,), float(device))}) for device in (9, 4)]
    handles = (await reduced({"m": collect}, payloads, [1, 1]))["m"]
    for payload in payloads:
        payload.discard()
    assert [handle.device for handle in handles] == [9, 4]
    assert [handle.load()["w"].tolist() for handle in handles] == [[9.0, 9.0], [4.0, 4.0]]


async def test_a_fault_while_folding_is_raised_at_the_end(payload_of):
    payloads = [payload_of(k, {"m/w": torch.tensor([float("inf")])}) for k in range(PAYLOADS)]
    with pytest.raises(ValueError, match="not finite"):
        await reduced({"m": mean}, payloads, [1] * PAYLOADS)


async def test_a_result_can_be_written_to_and_is_its_own(payload_of):
    payload = payload_of(0, {"m/w": torch.ones(3)})
    (await reduced({"m": mean}, [payload], [1], keep=True))["m"]["w"].zero_()
    assert payload.load()["m/w"].tolist() == [1.0, 1.0, 1.0]


async def test_a_key_without_tensors_is_named(payload_of):
    with pytest.raises(ConfigurationError, match="'other' by mean"):
        await reduced({"other": mean}, [payload_of(0, {"m/w": torch.ones(1)})], [1])
