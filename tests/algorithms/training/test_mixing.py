"""It is found out whether a model of the user's own mixes the samples of a batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedemu.algorithms.interface import Tree
from fedemu.algorithms.models.low_precision import with_precision
from fedemu.algorithms.models.randomness.draws import Draws
from fedemu.algorithms.models.randomness.random_functions import Keyed, models_draw_by
from fedemu.algorithms.models.torch_module import ModuleModel, from_module
from fedemu.algorithms.training.mixing import OwnModel, rows_matter


class Net(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.between = between or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.between(self.first(x)))
        return logits


class Gated(Net):
    """What mixes is scaled by a parameter that begins with 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.gate * x.flip(0))


class Sequence(Net):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.LSTM(2, 3, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.view(-1, 3, 2))[0][:, -1]
        return logits


class Centred(torch.autograd.Function):
    """Changes nothing, and subtracts the mean of the batch from the gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def setup_context(context: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(context: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        return slope - slope.mean(0)


def centred(h: Tensor) -> Tensor:
    found: Tensor = Centred.apply(h)
    return found


class Words(Net):
    def __init__(self, mixing: bool, counting: bool = False) -> None:
        super().__init__()
        self.table, self.mixing = nn.Embedding(2, 1, scale_grad_by_freq=counting), mixing

    def forward(self, x: Tensor) -> Tensor:
        words = self.table(x).squeeze(-1)
        return super().forward(words - words.mean(0) if self.mixing else words)


def normalised(**settings: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4, **settings), nn.Linear(4, 3))


def branching(h: Tensor) -> Tensor:
    return h - h.mean(0) if h.sum() < 1e6 else h


def by_numpy(h: Tensor) -> Tensor:
    return h * float(np.random.rand())


MIXING: dict[str, Callable[[], nn.Module]] = {
    "means": lambda: Net(lambda h: h - h.mean(0)),
    "a gate that is closed at first": Gated,
    "batch normalisation": lambda: normalised(track_running_stats=False),
    "samples as the steps of a sequence": lambda: Sequence(batch_first=False),
    "the mean of gradients": lambda: Net(centred),
    "the number of samples": lambda: Net(lambda h: h / len(h)),
    "another way for a sample alone": lambda: Net(lambda h: h if len(h) > 1 else 2 * h),
}
APART: dict[str, Callable[[], nn.Module]] = {
    "layers": Net,
    "chances": lambda: nn.Sequential(Net(), nn.Softmax(1)),
    "half precision": lambda: Net().bfloat16(),
    "dropout": lambda: Net(nn.Dropout(0.5)),
    "sequences": lambda: Sequence(batch_first=True),
    "no stack": lambda: Net(branching),
    "draws by numpy": lambda: Net(by_numpy),
}


@pytest.mark.parametrize("build", MIXING.values(), ids=MIXING)
def test_a_model_that_mixes_samples_is_found(build: Callable[[], nn.Module]) -> None:
    model = OwnModel(from_module(build), (6,), tokens=False)
    assert not model.buffers
    assert rows_matter(model)
    assert rows_matter(with_precision(model, "bfloat16"))


@pytest.mark.parametrize("build", APART.values(), ids=APART)
def test_a_model_that_computes_each_sample_by_itself_or_cannot_be_stacked_is_none(
    build: Callable[[], nn.Module],
) -> None:
    assert not rows_matter(OwnModel(from_module(build), (6,), tokens=False))


def test_a_model_of_tokens_is_asked_by_tokens() -> None:
    assert rows_matter(OwnModel(from_module(lambda: Words(mixing=True)), (6,), tokens=True))
    assert rows_matter(OwnModel(from_module(lambda: Words(mixing=False, counting=True)), (6,), tokens=True))
    assert not rows_matter(OwnModel(from_module(lambda: Words(mixing=False)), (6,), tokens=True))


def test_running_statistics_mix_in_training_alone() -> None:
    model = OwnModel(from_module(normalised), (6,), tokens=False)
    assert (model.mixes(True), model.mixes(False)) == (True, False)


def test_what_mixes_in_the_backward_pass_alone_does_not_in_evaluation() -> None:
    model = OwnModel(from_module(lambda: Net(centred)), (6,), tokens=False)
    assert (model.mixes(True), model.mixes(False)) == (True, False)


def test_a_method_reaches_what_else_its_model_has() -> None:
    class Measured(ModuleModel):
        depth = 3

    model = OwnModel(Measured(Net(), "dense", lambda seed: Net()), (6,), tokens=False)
    assert copy.copy(model).depth == 3
    with pytest.raises(AttributeError, match="width"):
        _ = model.width


def test_what_is_drawn_meanwhile_is_forgotten() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    expected = torch.rand(1), np.random.rand()
    torch.manual_seed(0)
    np.random.seed(0)
    OwnModel(from_module(lambda: Net(by_numpy)), (6,), tokens=False).mixes(True)
    assert (torch.rand(1), np.random.rand()) == expected


def by_torch(x: Tensor) -> Tensor:
    return x + torch.poisson(torch.ones_like(x))


def by_python(x: Tensor) -> Tensor:
    return x * random.random()


@pytest.mark.parametrize("between", [by_torch, by_python, by_numpy])
def test_what_a_model_draws_in_evaluation_is_the_same_each_time_and_anew_in_each_pass_of_a_job(
    between: Callable[[Tensor], Tensor],
) -> None:
    model = OwnModel(from_module(lambda: Net(between)), (6,), tokens=False)
    variables, x = model.init(0), torch.ones(5, 6)

    def logits() -> Tensor:
        return model.apply(variables, x, False)[0].logits

    def passes(seed: int) -> list[Tensor]:
        with models_draw_by(Draws(torch.tensor([seed, 0], dtype=torch.int32))):
            return [logits(), logits()]

    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    assert torch.equal(logits(), logits())
    first, second = passes(1)
    assert not torch.equal(first, second)
    assert all(torch.equal(one, again) for one, again in zip((first, second), passes(1), strict=True))
    assert not torch.equal(first, passes(2)[0])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), str(np.random.get_state())) == before[1:]


def test_what_a_model_draws_in_training_follows_from_the_generators_that_its_executor_has_seeded() -> None:
    model = OwnModel(from_module(lambda: Net(by_python)), (6,), tokens=False)
    variables, x = model.init(0), torch.ones(5, 6)
    with Keyed(Draws(torch.zeros(2, dtype=torch.int32))):
        once, again = (model.apply(variables, x, True)[0].logits for _ in range(2))
    assert not torch.equal(once, again)


def test_a_model_that_draws_can_be_mapped_and_differentiated() -> None:
    model = OwnModel(from_module(lambda: Net(by_python)), (6,), tokens=False)
    variables, x = model.init(0), torch.ones(5, 6)

    def total(variables: Tree, x: Tensor) -> Tensor:
        return model.apply(variables, x[None], False)[0].logits.sum()

    slopes = [torch.func.vmap(torch.func.grad(total), (None, 0))(variables, x)["last.weight"] for _ in range(2)]
    assert torch.equal(*slopes)


def test_a_model_that_drew_nothing_at_first_is_applied_as_it_is_from_then_on() -> None:
    model = OwnModel(from_module(lambda: Net(nn.Dropout(0.5))), (6,), tokens=False)
    variables, x = model.init(0), torch.ones(5, 6)
    model.apply(variables, x, False)
    after = copy.deepcopy(model)
    after.inner.apply = by_state  # type: ignore[method-assign]
    assert after.apply(variables, x, False) == (random.getstate(), {})


def by_state(variables: Tree, x: Tensor, train: bool) -> Any:
    return random.getstate(), {}
