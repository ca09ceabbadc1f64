"""Operations of a stack, recorded and not: equal numbers have equal bits in all slots. A layout is tried once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fedemu.algorithms.layouts import Layout
from fedemu.device.compute.tapes import alike as module
from fedemu.device.compute.tapes.alike import alike, all_alike, is_concerned
from fedemu.device.compute.tapes.private_torch import OperationWatcher, operator_name
from fedemu.device.compute.tapes.tracing import trace

ATEN, CPU = torch.ops.aten, torch.device("cpu")
SLOTS = 5


def step(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
    """What a device computes: its own products, one with a matrix that all share, and functions of elements."""
    inner = functional.batch_norm(functional.silu(x @ weight), None, None, training=True)
    return torch.sigmoid(functional.elu(inner @ other)).sum(0) * torch.ones(3).sigmoid_()


def stacked(x: Tensor, weight: Tensor, other: Tensor) -> list[Tensor]:
    slope = torch.func.grad(lambda weight, x: step(x, weight, other).sum())
    mapped = torch.func.vmap(lambda x, weight: (step(x, weight, other), slope(weight, x)))
    return list(mapped(x, weight))


@pytest.fixture
def given() -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    x, weight, other = (torch.randn(shape, generator=draws) for shape in ((7, 9), (9, 5), (5, 3)))
    return x.expand(SLOTS, 7, 9).contiguous(), weight.expand(SLOTS, 9, 5).contiguous(), other


def test_equal_devices_have_equal_bits_recorded_and_not(given: tuple[Tensor, Tensor, Tensor]) -> None:
    recorded = trace(stacked, given, slots=SLOTS)(*given)
    with all_alike(SLOTS):
        computed = stacked(*given)
    for one, other, plain in zip(recorded, computed, stacked(*given), strict=True):
        assert all(torch.equal(one[0], each) for each in one)
        assert torch.equal(one, other)
        assert torch.allclose(one, plain, atol=1e-5)


def test_a_watcher_sees_the_operators_themselves(given: tuple[Tensor, Tensor, Tensor]) -> None:
    seen: list[str] = []

    def note(operator: Any, *_: Any) -> None:
        seen.append(operator_name(operator))

    x, weight, _ = given
    with torch.no_grad(), all_alike(SLOTS), OperationWatcher(note):
        torch.bmm(x, weight).sigmoid()
    assert seen == ["aten::bmm", "aten::sigmoid"]


def test_a_watcher_around_it_does_not_see_how_an_operator_is_tried(
    given: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    x, weight, _ = given
    monkeypatch.setattr(module, "_found", {})
    with torch.no_grad(), OperationWatcher(lambda operator, *_: seen.append(operator_name(operator))):
        with all_alike(SLOTS):
            found = torch.bmm(x, weight)
        tried = len(seen)
        with all_alike(SLOTS):
            again = torch.bmm(x, weight)
    assert seen[:tried] == seen[tried:]
    assert torch.equal(found, again)


def test_without_slots_nothing_is_computed_otherwise(given: tuple[Tensor, Tensor, Tensor]) -> None:
    x, _, _ = given
    with all_alike(0):
        found = x.sigmoid()
    assert torch.equal(found, x.sigmoid())


def test_a_layout_is_tried_once_and_not_too_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(left: Tensor, right: Tensor) -> Tensor:
        calls.append(1)
        return torch.zeros(len(left), left.shape[1], right.shape[2])

    def asked(rows: int) -> None:
        layouts = [Layout.of(torch.zeros(shape)) for shape in ((SLOTS, rows, 3), (SLOTS, 3, 2))]
        assert alike(ATEN.bmm.default, counted, layouts, {}, layouts[:1], CPU, SLOTS) is None

    monkeypatch.setattr(module, "_found", {})
    monkeypatch.setattr(module, "MAX_FOUND", 2)
    asked(7)
    tried = len(calls)
    asked(7)
    assert len(calls) == tried > 0
    for rows in (8, 9, 7):
        asked(rows)
    assert len(calls) > 3 * tried


def test_only_floats_on_a_processor_are_concerned() -> None:
    floats, whole = Layout.of(torch.zeros(3, 5)), Layout.of(torch.zeros(3, 5, dtype=torch.int64))
    sigmoid = ATEN.sigmoid.default
    assert alike(sigmoid, sigmoid, [floats], {}, [floats], CPU, 3) is not None
    assert alike(sigmoid, sigmoid, [floats], {}, [floats], torch.device("cuda"), 3) is None
    assert alike(ATEN.sum.dim_IntList, torch.sum, [whole, [1]], {}, [whole], CPU, 3) is None
    assert alike(ATEN.add.Tensor, torch.add, [floats, floats], {}, [floats], CPU, 3) is None
    concerned = (ATEN.bmm.default, ATEN.elu_.default, ATEN.convolution.default, ATEN.mean.dim)
    assert all(map(is_concerned, concerned))
    assert not any(map(is_concerned, (ATEN.add.Tensor, ATEN.exp.default, ATEN.view.default)))
