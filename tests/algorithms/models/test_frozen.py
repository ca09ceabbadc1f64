"""Modules with ``requires_grad_(False)``: what is frozen is no variable, never changes, and is saved all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import PartlyFrozen
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.frozen import frozen_of
from fedemu.algorithms.models.growing import SEEN, growing
from fedemu.algorithms.models.layer_statistics import watched
from fedemu.algorithms.models.torch_module import from_module, under_seed
from fedemu.algorithms.registry import build_algorithm
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError

SHAPE, CLASSES = (1, 8, 8), 4
HEAD = {"head.weight", "head.bias"}


class Tuned(nn.Module):
    """A backbone with batch normalisation and dropout, all frozen, below a head that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Dropout(), nn.ReLU(), nn.Flatten(), nn.Linear(108, 6)
        )
        self.head = nn.Linear(6, CLASSES)
        self.backbone.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(x).relu()
        return self.head(features), features


class PartlyTuned(nn.Module):
    """A frozen weight in a trained layer, a frozen norm and one that is trained, and two names for a frozen tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(64, 5), nn.Linear(5, 5)
        self.still, self.norm, self.last = nn.BatchNorm1d(5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)
        self.same = self.still
        self.register_buffer("shift", torch.tensor(0.5))
        self.first.weight.requires_grad_(False)
        self.still.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.last(self.norm(self.again(self.same(self.first(x.flatten(1)))) + self.shift).relu())
        return hidden


def x(rows: int = 5) -> Tensor:
    return torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(rows))


def test_only_what_is_trained_is_a_variable_and_what_is_saved_fills_a_module() -> None:
    model = from_module(Tuned, seed=3)
    variables = model.init(3)
    assert variables.keys() == HEAD
    assert model.buffers == frozenset()
    assert isinstance(model, PartlyFrozen)
    whole = Tuned()
    whole.load_state_dict({**model.frozen, **variables}, strict=True)
    drawn = under_seed(Tuned, 3).state_dict()
    assert all(torch.equal(leaf, drawn[name]) for name, leaf in whole.state_dict().items())


def test_frozen_tensors_follow_from_their_own_seed_and_no_other() -> None:
    def weight(seed: int) -> Tensor:
        return from_module(Tuned, seed=seed).frozen["backbone.0.weight"]

    assert torch.equal(weight(1), weight(1))
    assert not torch.equal(weight(1), weight(2))
    model = from_module(Tuned, seed=1)
    before = model.frozen["backbone.0.weight"].clone()
    assert not torch.equal(model.init(1)["head.weight"], model.init(2)["head.weight"])
    assert torch.equal(model.frozen["backbone.0.weight"], before)


def test_a_frozen_part_is_applied_as_in_evaluation_and_changes_no_statistics() -> None:
    model, module = from_module(Tuned, seed=1), under_seed(Tuned, 1).eval()
    before = {name: leaf.clone() for name, leaf in model.frozen.items()}
    for train in (True, False):
        outputs, buffers = model.apply(model.init(1), x(), train)
        torch.testing.assert_close(outputs.logits, module(x())[0])
        assert buffers == {}
    assert all(torch.equal(leaf, before[name]) for name, leaf in model.frozen.items())


def test_a_module_may_be_frozen_in_parts() -> None:
    model = from_module(PartlyTuned)
    variables = model.init(0)
    trained = {"first.bias", "again.weight", "again.bias", "norm.weight", "norm.bias", "last.weight", "last.bias"}
    running = {f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert variables.keys() == trained | running | {"shift"}
    assert model.buffers == running | {"shift"}
    _, buffers = model.apply(variables, x(), True)
    module = under_seed(PartlyTuned, 0).train()
    module.still.eval()
    module(x())
    torch.testing.assert_close(buffers["norm.running_mean"], module.norm.running_mean)
    PartlyTuned().load_state_dict({**model.frozen, **variables}, strict=True)
    assert torch.equal(model.frozen["same.running_var"], torch.ones(5))


def test_gradients_go_through_frozen_layers_to_what_lies_below() -> None:
    model = from_module(PartlyTuned)
    variables = {name: leaf.requires_grad_() for name, leaf in model.init(0).items() if name not in model.buffers}
    logits = model.apply({**model.init(0), **variables}, x(), True)[0].logits
    logits.square().sum().backward()
    assert float(variables["first.bias"].grad.abs().sum()) > 0  # type: ignore[union-attr]
    assert not model.frozen["first.weight"].requires_grad


@pytest.mark.parametrize("module", [nn.Flatten(), nn.Linear(64, CLASSES).requires_grad_(False)])
def test_a_module_with_nothing_to_train_is_refused_in_a_sentence(module: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match=r"^nothing in the module \w+ can be trained, because none of its"):
        from_module(lambda: module)


def test_a_layer_without_sizes_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigurationError, match=r"'1\.weight' of the module Sequential has no size before the first"):
        from_module(lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(4)))


def test_frozen_tensors_follow_the_samples_to_their_device_once() -> None:
    model = from_module(Tuned)
    variables = {name: leaf.to("meta") for name, leaf in model.init(0).items()}

    def loss(trained: dict[str, Tensor]) -> Tensor:
        return model.apply(trained, x().to("meta"), True)[0].logits.sum()

    slopes = torch.func.grad(loss)(variables)
    assert {leaf.device.type for leaf in slopes.values()} == {"meta"}
    assert model._beside(x().to("meta")) is model._beside(x().to("meta"))
    assert model.apply(model.init(0), x(), True)[0].logits.device.type == "cpu"


def test_models_around_a_module_tell_what_is_frozen_in_it() -> None:
    tasks = ClassTasks.of(CLASSES, 2, [2, 0, 3, 1])
    model = growing(from_module(Tuned), tasks, SHAPE)
    assert model.init(0).keys() == {*HEAD, SEEN}
    watching = watched(model, SHAPE)
    # The running statistics of a frozen norm say nothing of this stream, so devices report those of its inputs.
    assert watching.added == {"watched.backbone.1.mean", "watched.backbone.1.var"}
    for outer in (model, model.observed(), watching):
        assert {*frozen_of(outer)} == {*Tuned().state_dict()} - HEAD
    assert frozen_of(mlp(SHAPE, CLASSES)) == {}

    class FixedHead(Tuned):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(True).head.requires_grad_(False)

    with pytest.raises(ConfigurationError, match="this one has no such layer that is trained"):
        growing(from_module(FixedHead), tasks, SHAPE)


# In training

GENERATOR = {"iterations": 2, "generator_batch": 4, "noise": 6, "synthetic_batch": 3}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedcurv": {"samples": 6, "penalty": 0.01},
    "fedreg": {"iterations": 1, "rehearsals": 1},
    "mfcl": GENERATOR,
    "fedcil": {"noise": 6, "server_iterations": 2, "server_samples": 4},
}
SHARES = [np.arange(40 * i, 40 * i + 9 + 7 * i) for i in range(3)]
STREAM = [[share[first::2] for share in SHARES] for first in (0, 1)]


@pytest.fixture(scope="module")
def corpus(corpus: Corpus) -> Corpus:
    """The middle of the pictures, in a size for which there is a generator."""
    split = replace(corpus.train, x=np.ascontiguousarray(corpus.train.x[:, :, 2:10, 2:10]))
    return replace(corpus, train=split, test=split, input_shape=SHAPE)


@pytest.mark.parametrize(
    "name", ["fedavg", "fedprox", "scaffold", "fedntd", "moon", "fedcurv", "fedreg", "mfcl", "fedcil"]
)
def test_methods_train_the_head_alone_and_send_nothing_else(name: str, little_fleet: Callable[..., Any]) -> None:
    """Both executors agree, and neither momentum nor weight decay nor a method's own terms touch what is frozen."""
    model: Any = from_module(Tuned, seed=1)
    in_tasks = name in ("mfcl", "fedcil", "fedprox")
    if in_tasks:
        model = growing(model, ClassTasks.of(CLASSES, 2, [2, 0, 3, 1]), SHAPE)
    settings = Ingredients(
        model, cross_entropy, CLASSES, 1, 5, 0.05, 0.5, weight_decay=0.1, devices=3, input_shape=SHAPE
    )
    before = {key: leaf.clone() for key, leaf in frozen_of(model).items()}
    algorithm = build_algorithm(name, OPTIONS.get(name, {}), settings)
    executor = Checked(Serial(), Vmapped(2))
    stream = STREAM if in_tasks else ()
    fleet = little_fleet(algorithm, model.init(1), SHARES, stream=stream, executor=executor)
    for cohort in ([0, 1], [1, 2]):
        fleet.play(cohort)
        if name == "fedcil":
            # In the second task, a bias of the generator has a gradient of mere rounding, which Adam makes a step.
            fleet.executor = Vmapped(2)
        sent = {leaf for payload in fleet.payloads.values() for tree in payload.values() for leaf in tree}
        assert not sent & before.keys()
    assert not any(torch.equal(fleet.model[key], model.init(1)[key]) for key in HEAD)
    assert all(torch.equal(leaf, before[key]) for key, leaf in frozen_of(model).items())


def test_padding_may_be_left_out_beside_a_frozen_norm() -> None:
    program = LocalSGD(from_module(Tuned), lambda *_: ..., 1, 2, 0.1)  # type: ignore[arg-type,return-value]
    assert not program.stages[0].rows_matter
