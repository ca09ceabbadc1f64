"""Iterations of server jobs: the same bits captured and not, and which of them stay ordinary."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedemu.algorithms.graphs.captures import ORDINARY_STEPS, GraphRecorder
from fedemu.algorithms.graphs.repeated import Repeated, recorded_by, uploaded
from fedemu.algorithms.interface import Context, Labelled, Model, PublicData, Tree
from fedemu.algorithms.models.feed_forward import cnn, mlp
from fedemu.algorithms.models.randomness.draws import Draws, keys
from fedemu.algorithms.models.randomness.random_functions import models_draw_by, repeatable
from fedemu.algorithms.models.resnet import resnet18
from fedemu.algorithms.models.torch_module import from_module
from fedemu.algorithms.training import job_device
from fedemu.algorithms.training.adam import Adam
from fedemu.algorithms.training.job_device import jobs_compute_on
from fedemu.algorithms.training.local_sgd import SGD
from fedemu.algorithms.training.mixing import OwnModel
from fedemu.algorithms.training.server_training import Optimiser, ServerTraining
from fedemu.algorithms.trees import model_digest

CPU = torch.device("cpu")
SHAPE = (3, 16, 16)


def descend(carry: Tree, fixed: Tree, given: Tree) -> Tree:
    """A step of gradient descent on some rows, and the number of steps."""
    w = carry["w"].detach().requires_grad_()
    loss = (fixed["x"][given["rows"]] @ w - given["rows"][:, None]).square().mean()
    (slope,) = torch.autograd.grad(loss, w)
    return {"w": (w - 0.05 * slope).detach(), "steps": carry["steps"] + 1}


def inputs(sizes: list[int]) -> list[Tree]:
    random = np.random.default_rng(0)
    return [{"rows": torch.from_numpy(random.integers(0, 9, size))} for size in sizes]


def started() -> tuple[Tree, Tree]:
    random = torch.Generator().manual_seed(0)
    return {"w": torch.randn(4, 2, generator=random), "steps": torch.tensor(0)}, {"x": torch.randn(9, 4)}


def test_iterations_have_the_same_bits_captured_and_not_and_one_graph_for_each_layout(rehearse: Any) -> None:
    carry, fixed = started()
    sizes = [5, 5, 5, 3] * 5
    with recorded_by(lambda device: None):
        expected = Repeated(descend).over(carry, fixed, inputs(sizes), CPU)
    recorder, repeated, found = rehearse(), Repeated(descend), carry
    with recorded_by(lambda device: recorder):
        for start in range(0, len(sizes), 4):
            before = found
            kept = {name: leaf.clone() for name, leaf in before.items()}
            found = repeated.over(before, fixed, inputs(sizes)[start : start + 4], CPU)
            assert all(torch.equal(before[name], leaf) for name, leaf in kept.items()), "what a call gave stays"
    assert torch.equal(found["w"], expected["w"])
    assert found["steps"] == expected["steps"] == len(sizes)
    assert recorder.records == 2
    assert recorder.replays == len(sizes) - 2 * ORDINARY_STEPS


def test_what_one_device_has_recorded_is_not_for_another(rehearse: Any) -> None:
    carry, fixed = started()
    recorder, repeated, meta = rehearse(), Repeated(descend), torch.device("meta")

    def there(tree: Tree) -> Tree:
        return {name: leaf.to(meta) for name, leaf in tree.items()}

    with recorded_by(lambda device: recorder if device == meta else None):
        few = map(there, inputs([5] * ORDINARY_STEPS))
        assert repeated.over(there(carry), there(fixed), few, meta)["w"].is_meta
        found = repeated.over(carry, fixed, inputs([5] * 9), CPU)
    assert torch.equal(found["w"], Repeated(descend).over(carry, fixed, inputs([5] * 9), CPU)["w"])
    assert recorder.records == 0


def test_without_a_gpu_nothing_is_recorded_or_copied() -> None:
    carry, fixed = started()
    seen: list[Tree] = []

    def watch(carry: Tree, fixed: Tree, given: Tree) -> Tree:
        seen.append(carry)
        return {**carry}

    after = Repeated(watch).over(carry, fixed, [{}] * 3, CPU)
    assert after["w"] is carry["w"]
    assert len(seen) == 3
    parts = [torch.tensor([1, 2]), torch.tensor(3)]
    assert all(one is other for one, other in zip(uploaded(parts, CPU), parts, strict=True))


def test_what_is_uploaded_together_has_memory_of_its_own() -> None:
    parts = [torch.tensor([[1, 2, 3]]), torch.tensor(4), torch.tensor([], dtype=torch.int64)]
    found = uploaded(parts, torch.device("meta"))
    assert [(part.shape, part.dtype, part.device.type) for part in found] == [
        (part.shape, torch.int64, "meta") for part in parts
    ]
    assert len({part.untyped_storage()._cdata for part in found}) == len(parts)


def test_an_iteration_that_draws_is_not_captured_because_a_graph_would_draw_the_same_again(rehearse: Any) -> None:
    def noisy(carry: Tree, fixed: Tree, given: Tree) -> Tree:
        with repeatable():
            return {"w": functional.dropout(carry["w"] + 1, 0.5)}

    def played(recorder: object) -> Tensor:
        draws = Draws(torch.from_numpy(keys(np.array([7], np.uint64), np.array([0])))[0])
        with recorded_by(lambda device: recorder), models_draw_by(draws):  # type: ignore[arg-type, return-value]
            return Repeated(noisy).over({"w": torch.ones(50)}, {}, [{}] * 9, CPU)["w"]

    recorder = rehearse()
    assert torch.equal(played(recorder), played(None))
    assert recorder.records == 0


def test_a_carry_that_changes_its_order_in_memory_is_captured_only_where_it_keeps_it(rehearse: Any) -> None:
    def turn(carry: Tree, fixed: Tree, given: Tree) -> Tree:
        return {"w": (carry["w"] * 2).t().contiguous().t()}

    recorder, repeated = rehearse(), Repeated(turn)
    with recorded_by(lambda device: recorder):
        for _ in range(9):
            found = repeated.over({"w": torch.ones(2, 3)}, {}, [{}], CPU)
            assert (found["w"].tolist(), found["w"].stride()) == ([[2.0] * 3] * 2, (1, 2))
        assert recorder.records == 0
        found = repeated.over({"w": torch.ones(2, 3)}, {}, [{}] * 9, CPU)
    assert (found["w"].tolist(), recorder.records) == ([[512.0] * 3] * 2, 1)


def distilling(model: Model, optimiser: Optimiser) -> Callable[[torch.device], Tree]:
    """The carry of a server training of six passes on a device. The last batch of a pass is smaller."""
    random = torch.Generator().manual_seed(1)
    parts = (
        Labelled(torch.randn(n, *SHAPE, generator=random), torch.randint(0, 4, (n,), generator=random)) for n in (40, 9)
    )
    context = Context(round=2, task=0, seed=3, classes=4, public=PublicData(*parts))

    def loss(logits: Tensor, y: Tensor, lessons: Tree, rows: Tensor) -> Tensor:
        return functional.cross_entropy(logits, y) + (logits - lessons["logits"][rows]).square().mean()

    def lessons(public: Labelled) -> Tree:
        return {"logits": public.x.mean((1, 2, 3))[:, None].expand(-1, 4).contiguous()}

    def computed(device: torch.device) -> Tree:
        training = ServerTraining(model, loss, optimiser, lambda batch: 0.05 / (1 + batch), 16, 6, 9, clip_norm=1.0)
        job = training.job("distillation", model.init(0), lessons, context)
        with jobs_compute_on(lambda: device):
            carry = job.init()
            for index in range(job.steps):
                carry, _ = job.step(carry, index)
        return {name: leaf.cpu() for name, leaf in carry.items()}

    return computed


@pytest.mark.parametrize("optimiser", [SGD(0.9), Adam()], ids=["sgd", "adam"])
def test_a_server_training_has_the_same_bits_captured_and_not(optimiser: Optimiser, rehearse: Any) -> None:
    computed, recorder = distilling(mlp(SHAPE, 4, hidden=[13]), optimiser), rehearse()
    expected = computed(CPU)
    with recorded_by(lambda device: recorder):
        found = computed(CPU)
    assert model_digest(found) == model_digest(expected)
    assert recorder.records == 2, "for whole batches, and for the last of a pass"


@pytest.mark.parametrize(("drawing", "records"), [(False, 2), (True, 0)])
def test_a_model_of_ones_own_is_captured_if_it_draws_nothing(drawing: bool, records: int, rehearse: Any) -> None:
    """At first it takes a seed, because nobody knows yet whether it draws."""

    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = super().forward(x)
            return torch.poisson(logits.detach().abs()) + logits if drawing else logits

    model = OwnModel(from_module(lambda: Own(nn.Flatten(), nn.Linear(math.prod(SHAPE), 4))), SHAPE, False)
    draws = Draws(torch.from_numpy(keys(np.array([7], np.uint64), np.array([0])))[0])
    computed, recorder = distilling(model, SGD(0.9)), rehearse()
    with recorded_by(lambda device: recorder), models_draw_by(draws):
        computed(CPU)
    assert recorder.records == records


@pytest.mark.gpu
@pytest.mark.parametrize("optimiser", [SGD(0.9), Adam()], ids=["sgd", "adam"])
@pytest.mark.parametrize("make", [mlp, cnn, resnet18])
def test_a_server_training_on_a_gpu_has_the_same_bits_captured_and_not(
    make: Callable[..., Model], optimiser: Optimiser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(job_device, "is_large", lambda model, variables: True)
    model = make(SHAPE, 4, hidden=[13]) if make is mlp else make(SHAPE, 4)
    computed, gpu = distilling(model, optimiser), torch.device("cuda")
    with recorded_by(lambda device: None):
        expected = computed(gpu)
    records: list[object] = []

    class Counted(GraphRecorder):
        def record(self, work: Any) -> Any:
            made = super().record(work)
            records.append(made)
            return made

    with recorded_by(lambda device: Counted()):
        found = computed(gpu)
    assert model_digest(found) == model_digest(expected)
    assert len(records) >= 2


@pytest.mark.gpu
def test_an_iteration_that_reads_values_goes_on_beside_captured_ones(caplog: pytest.LogCaptureFixture) -> None:
    def reading(carry: Tree, fixed: Tree, given: Tree) -> Tree:
        return {"w": carry["w"] * (2 if float(carry["w"].sum()) > 0 else 3)}

    def plain(carry: Tree, fixed: Tree, given: Tree) -> Tree:
        return {"w": carry["w"] * 2}

    gpu, refused, captured = torch.device("cuda"), Repeated(reading), Repeated(plain)
    for _ in range(3):
        found = [each.over({"w": torch.ones(3, device=gpu)}, {}, [{}] * 9, gpu) for each in (refused, captured)]
        assert [tree["w"].tolist() for tree in found] == [[512.0] * 3] * 2
    assert len([record for record in caplog.records if "not captured" in record.getMessage()]) == 1
