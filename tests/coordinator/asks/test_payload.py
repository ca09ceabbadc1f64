"""Payloads of devices: which are refused, and how accepted ones are kept and loaded."""

import math
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from fedemu.coordinator.asks import payload as payload_module
from fedemu.coordinator.asks.payload import Payload, PayloadError, PayloadTemplate, check, spill
from fedemu.coordinator.asks.tensors import Subtree
from fedemu.protocol.errors import FedemuError, ProtocolError
from fedemu.protocol.messages import TensorSpec

FOREST = {
    "model": {"weight": torch.tensor([[3.0, 0.0], [0.0, 0.0]]), "steps": torch.tensor(1000)},
    "control": {"weight": torch.tensor([4.0], dtype=torch.float64)},
}
TEMPLATE = PayloadTemplate.of(FOREST)


def on_the_wire(forest: Mapping[str, Mapping[str, torch.Tensor]]):
    """The specs and buffers of a forest, as a Result carries them."""
    leaves = {f"{key}/{name}": tensor for key, tree in forest.items() for name, tensor in tree.items()}
    specs = tuple(
        TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for name, tensor in leaves.items()
    )
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in leaves.values()]
    return specs, [memoryview(data) for data in raw]


def replaced(key: str, name: str, tensor: torch.Tensor):
    return {**FOREST, key: {**FOREST[key], name: tensor}}


def refused(forest, template=TEMPLATE, max_norm=math.inf) -> str:
    with pytest.raises(PayloadError) as caught:
        check(*on_the_wire(forest), template, max_norm)
    assert str(caught.value)
    return caught.value.reason


def test_a_template_names_leaves_by_key_and_adds_up_their_bytes():
    assert list(TEMPLATE.leaves) == ["model/weight", "model/steps", "control/weight"]
    assert TEMPLATE.leaves["model/weight"].shape == (2, 2)
    assert TEMPLATE.bytes == 16 + 8 + 8
    assert TEMPLATE.bytes_without({"control", "other"}) == 16 + 8


def test_a_payload_error_is_a_protocol_error():
    assert issubclass(PayloadError, ProtocolError)


def test_a_payload_like_its_template_passes_in_any_order():
    specs, frames = on_the_wire(FOREST)
    check(specs, frames, TEMPLATE, math.inf)
    check(specs[::-1], frames[::-1], TEMPLATE, math.inf)


def test_an_empty_payload_passes_if_nothing_was_asked_for():
    check((), [], PayloadTemplate.of({}), 0.0)


def test_a_missing_an_additional_and_a_repeated_name_are_refused():
    specs, frames = on_the_wire(FOREST)
    assert refused({"model": FOREST["model"]}) == "names"
    assert refused({**FOREST, "more": {"x": torch.zeros(1)}}) == "names"
    with pytest.raises(PayloadError, match="model/weight came more than once") as caught:
        check((*specs, specs[0]), [*frames, frames[0]], TEMPLATE, math.inf)
    assert caught.value.reason == "names"


def test_another_dtype_is_refused():
    assert refused(replaced("model", "weight", torch.zeros(2, 2, dtype=torch.float16))) == "dtype"


def test_another_shape_of_as_many_elements_is_refused():
    assert refused(replaced("model", "weight", torch.zeros(4))) == "shape"


def test_a_buffer_of_another_length_than_its_shape_is_refused():
    specs, frames = on_the_wire(FOREST)
    with pytest.raises(PayloadError, match="12 bytes") as caught:
        check(specs, [frames[0][:12], *frames[1:]], TEMPLATE, math.inf)
    assert caught.value.reason == "shape"


def test_too_few_buffers_are_refused():
    specs, frames = on_the_wire(FOREST)
    with pytest.raises(PayloadError) as caught:
        check(specs, frames[:-1], TEMPLATE, math.inf)
    assert caught.value.reason == "shape"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 8191, 8192, 20000])
def test_one_value_that_is_not_finite_is_found_anywhere(dtype, value, place):
    tensor = torch.ones(20001, dtype=dtype)
    forest = {"model": {"weight": tensor}}
    template = PayloadTemplate.of(forest)
    check(*on_the_wire(forest), template, math.inf)
    tensor[place] = value
    assert refused(forest, template) == "nonfinite"


def test_the_norm_goes_over_all_floating_leaves_and_no_integers():
    specs, frames = on_the_wire(FOREST)
    check(specs, frames, TEMPLATE, 5.0)
    assert refused(FOREST, max_norm=4.999999) == "norm"


def test_values_whose_squares_overflow_are_refused_for_their_norm():
    assert refused(replaced("control", "weight", torch.tensor([1e200], dtype=torch.float64))) == "norm"


def test_a_bool_of_other_bytes_than_zero_and_one_is_refused():
    forest = {"model": {"mask": torch.tensor([True, False])}}
    specs, frames = on_the_wire(forest)
    check(specs, frames, PayloadTemplate.of(forest), math.inf)
    with pytest.raises(PayloadError) as caught:
        check(specs, [memoryview(b"\x01\x02")], PayloadTemplate.of(forest), math.inf)
    assert caught.value.reason == "dtype"


def test_a_payload_that_is_added_up_soon_stays_where_it_came():
    specs, frames = on_the_wire(FOREST)
    wire = bytearray(frames[0])
    payload = Payload.of(7, specs, [memoryview(wire), *frames[1:]])
    loaded = payload.load()["model/weight"]
    assert loaded.tolist() == [[3.0, 0.0], [0.0, 0.0]]
    assert np.shares_memory(loaded, np.frombuffer(wire, np.uint8))


def test_a_small_payload_is_owned_in_memory(tmp_path: Path):
    specs, frames = on_the_wire(FOREST)
    wire = bytearray(frames[0])
    payload = spill(tmp_path / "spill", 7, specs, [memoryview(wire), *frames[1:]])
    wire[:] = bytes(len(wire))
    assert payload.device == 7
    assert payload.load()["model/weight"].tolist() == [[3.0, 0.0], [0.0, 0.0]]
    assert payload.load()["model/steps"].tolist() == 1000
    assert spill(tmp_path / "spill", 7, (), ()).load() == {}
    assert not (tmp_path / "spill").exists()


def test_a_large_payload_lies_in_a_file_without_a_name(tmp_path: Path):
    values = torch.arange(payload_module.FILE_THRESHOLD // 4 + 1, dtype=torch.float32)
    forest = {"model": {"odd": torch.tensor([1, 2, 3], dtype=torch.int8), "weight": values, "zero": torch.zeros(0)}}
    payload = spill(tmp_path / "spill", 0, *on_the_wire(forest))
    assert list((tmp_path / "spill").iterdir()) == []
    assert f"{tmp_path / 'spill'}/" in Path("/proc/self/maps").read_text(), "it takes the space of this disk"
    assert np.array_equal(payload.load()["model/weight"], values.numpy())
    assert payload.load()["model/odd"].tolist() == [1, 2, 3]
    assert payload.load()["model/zero"].tolist() == []


def test_a_process_that_is_killed_while_it_writes_a_payload_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, write = [], os.pwrite

    def watched(descriptor: int, data: memoryview, offset: int) -> int:
        seen.append([path.name for path in tmp_path.iterdir()])
        return write(descriptor, data, offset)

    monkeypatch.setattr("os.pwrite", watched)
    spill(tmp_path, 0, *on_the_wire({"model": {"weight": torch.ones(2**19)}}))
    assert seen == [[]]


def test_arrays_of_a_payload_cannot_be_written(tmp_path: Path):
    payload = spill(tmp_path, 0, *on_the_wire(FOREST))
    with pytest.raises(ValueError, match="read-only"):
        payload.load()["model/weight"][0, 0] = 1.0


@pytest.mark.parametrize("size", [4, payload_module.FILE_THRESHOLD])
def test_arrays_outlive_the_discarded_payload(tmp_path: Path, size: int):
    payload = spill(tmp_path, 3, *on_the_wire({"model": {"weight": torch.full((size,), 2.5)}}))
    arrays = payload.load()
    payload.discard()
    payload.discard()
    assert arrays["model/weight"].min() == 2.5
    with pytest.raises(ValueError, match="device 3 was discarded"):
        payload.load()


def test_leaves_of_every_dtype_and_of_no_elements_survive(tmp_path: Path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    leaves = {
        str(dtype): torch.tensor([0, 1, 1], dtype=dtype) for dtype in [*kinds, torch.int8, torch.uint8, torch.bool]
    }
    leaves["empty"] = torch.zeros(0, 3)
    payload = spill(tmp_path, 0, *on_the_wire({"all": leaves}))
    loaded = Subtree(payload, "all").load()
    assert {name: tensor.dtype for name, tensor in loaded.items()} == {n: t.dtype for n, t in leaves.items()}
    assert all(torch.equal(loaded[name], leaves[name]) for name in leaves)


def test_a_subtree_has_its_device_and_outlives_the_payload(tmp_path: Path):
    payload = spill(tmp_path, 5, *on_the_wire(FOREST))
    subtree = Subtree(payload, "model")
    payload.discard()
    assert subtree.device == 5
    assert set(subtree.load()) == {"weight", "steps"}
    subtree.load()["weight"].zero_()
    assert subtree.load()["weight"][0, 0] == 3.0


def test_a_place_that_cannot_hold_a_payload_is_named(tmp_path: Path):
    (tmp_path / "spill").write_text("a file")
    forest = {"model": {"weight": torch.zeros(payload_module.FILE_THRESHOLD)}}
    with pytest.raises(FedemuError, match=r"cannot keep a payload of 4194304 bytes in .*spill"):
        spill(tmp_path / "spill", 0, *on_the_wire(forest))
