"""Ordinary modules learn: a recurrent network, a small ViT, and models of Hugging Face from configurations."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.nn.utils.prune import l1_unstructured

from fedemu.algorithms.data.corpus import Corpus
from fedemu.algorithms.interface import Outputs
from fedemu.algorithms.models.randomness.draws import Draws
from fedemu.algorithms.models.randomness.random_functions import models_draw_by
from fedemu.algorithms.models.torch_module import from_module, outputs_of, under_seed
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import Objective
from fedemu.algorithms.trees import add, scale, without
from fedemu.coordinator.evaluation.evaluate import answer, read
from fedemu.coordinator.rounds.server_job_worker import Place
from fedemu.device.compute.executors.checked import Checked
from fedemu.device.compute.executors.executor import Executor, Job, JobResult, Source
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import ConfigurationError

DEVICES = 4


class Recurrent(nn.Module):
    """Reads an image line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, 2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x[:, 0])[0][:, -1])
        return out


class SmallViT(nn.Module):
    """Sixteen patches of 2 x 2 pixels, and one layer of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 2, 2)
        self.positions = nn.Parameter(torch.randn(16, 32) * 0.02)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.patches(x).flatten(2).mT + self.positions).flatten(1))
        return out


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDEMU_CACHE", str(tmp_path_factory.getbasetemp() / "digits-cache"))
        return open_corpus(load_experiment("digits-small", [], {})[0])


def averaged(build: Callable[[], nn.Module], digits: Corpus, rounds: int, **settings: Any) -> float:
    """The accuracy on the test split after rounds of FedAvg."""
    torch.set_num_threads(1)
    model = from_module(build)
    program = LocalSGD(model, Objective(model), **{"epochs": 2, "batch_size": 10, "momentum": 0.9, **settings})
    source, executor = Source(digits, 1, torch.device("cpu")), Vmapped(DEVICES)
    parts = np.array_split(np.random.default_rng(0).permutation(len(digits.train)), DEVICES)
    variables = model.init(0)
    for round in range(1, rounds + 1):
        jobs = [Job(device, round, 0, indices) for device, indices in enumerate(parts)]
        results = run(executor, program, {"model": variables}, jobs, source)
        for result in results:
            variables = add(variables, scale(result.payload["delta"], 1 / DEVICES))
    found = answer(model, variables, read(model, digits, digits.test, np.arange(len(digits.test))))
    return float(found.hits.mean())


def run(executor: Executor, program: Any, shared: Any, jobs: list[Job], source: Source) -> list[JobResult]:
    results = executor.run(program, shared, jobs, source)
    assert all(isinstance(result, JobResult) for result in results), results
    return results  # type: ignore[return-value]


def test_an_lstm_with_dropout_learns_the_digits(digits: Corpus) -> None:
    assert averaged(Recurrent, digits, rounds=6, epochs=1, lr=0.2) > 0.85


def test_a_small_vit_with_dropout_learns_the_digits(digits: Corpus) -> None:
    assert averaged(SmallViT, digits, rounds=2, lr=0.05) > 0.92


@pytest.mark.parametrize("build", [Recurrent, SmallViT])
def test_serial_and_stacked_agree(build: Callable[[], nn.Module], digits: Corpus) -> None:
    model = from_module(build)
    program = LocalSGD(model, Objective(model), epochs=1, batch_size=5, lr=0.1)
    jobs = [Job(device, 1, 0, np.arange(device, device + size)) for device, size in ((3, 7), (9, 10))]
    source = Source(digits, 1, torch.device("cpu"))
    run(Checked(Serial(), Vmapped(2)), program, {"model": model.init(0)}, jobs, source)


def vit(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers", reason="Hugging Face's models are no dependency")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    settings = transformers.ViTConfig(
        **shape, image_size=8, patch_size=4, num_channels=1, num_labels=10, hidden_dropout_prob=0.1
    )
    settings._attn_implementation = attention
    model: nn.Module = transformers.ViTForImageClassification(settings)
    return model


class Viewing(nn.Module):
    """A convolution and a complex filter, viewed in another form. Without ``views`` the same forms are copies."""

    def __init__(self, views: bool = True) -> None:
        super().__init__()
        self.views = views
        self.convolution, self.filter = nn.Conv2d(1, 3, 3, padding=1), nn.Parameter(torch.randn(3, 8, 8, 2))
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.filter if self.views else self.filter.contiguous()
        x = (self.convolution(x) * torch.view_as_complex(factor)).real
        rows: Tensor = self.head(x.view(-1, 192) if self.views else x.flatten(1))
        return rows


class Thinning(nn.Module):
    """Every second pixel of a convolution's result. With ``views`` it is found by its place in C order."""

    def __init__(self, views: bool = True) -> None:
        super().__init__()
        self.views = views
        self.convolution, self.head = nn.Conv2d(1, 3, 3, padding=1), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        x = x.as_strided((len(x), 3, 4, 4), (192, 64, 16, 2)) if self.views else x[:, :, ::2, ::2]
        logits: Tensor = self.head(x.flatten(1))
        return logits


@pytest.mark.parametrize("build", [Viewing, Thinning])
@pytest.mark.parametrize("executor", [Serial(), Serial(plain=True), Vmapped(2)], ids=["serial", "plain", "stack-2"])
def test_views_of_images_whose_channels_come_last_are_copies(
    executor: Executor, build: Callable[..., nn.Module], digits: Corpus
) -> None:
    model, copying = from_module(build), from_module(lambda: build(views=False))
    shared, source = {"model": model.init(0)}, Source(digits, 1, torch.device("cpu"))
    jobs = [Job(device, 1, 0, np.arange(device, device + 7)) for device in (3, 9)]
    found, expected = (
        run(executor, LocalSGD(each, Objective(each), epochs=1, batch_size=5, lr=0.1), shared, jobs, source)
        for each in (model, copying)
    )
    for ours, theirs in zip(found, expected, strict=True):
        for name, leaf in theirs.payload["delta"].items():
            assert leaf.any()
            assert torch.equal(ours.payload["delta"][name], leaf)


def test_a_module_with_views_is_evaluated(digits: Corpus) -> None:
    model, copying = from_module(Viewing), from_module(lambda: Viewing(views=False))
    tested, expected = (
        answer(each, model.init(0), read(each, digits, digits.test, np.arange(50))) for each in (model, copying)
    )
    assert np.array_equal(tested.losses, expected.losses)


class Bert(nn.Module):
    """A BERT whose encoder is frozen. It reads pixels as tokens."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers", reason="Hugging Face's models are no dependency")
        shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        settings = transformers.BertConfig(**shape, vocab_size=20, max_position_embeddings=64, num_labels=10)
        settings._attn_implementation = attention
        self.bert = transformers.BertForSequenceClassification(settings)
        self.bert.bert.encoder.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.bert(((x.flatten(1) + 2) * 4).long().clamp(0, 19))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("build", [vit, Bert])
def test_models_of_hugging_face_train_alike_in_both_executors(
    build: Callable[[str], nn.Module], attention: str, digits: Corpus
) -> None:
    model = from_module(lambda: build(attention))
    program = LocalSGD(model, Objective(model), epochs=1, batch_size=5, lr=0.1)
    source, shared = Source(digits, 1, torch.device("cpu")), {"model": model.init(0)}
    jobs = [Job(device, 1, 0, np.arange(device, device + 3)) for device in (3, 9)]
    results = run(Checked(Serial(), Vmapped(2)), program, shared, jobs, source)
    delta = results[0].payload["delta"]
    assert any(float(leaf.abs().max()) > 0 for leaf in delta.values())
    if build is Bert:
        assert not [name for name in delta if "encoder" in name]
        assert [name for name in model.frozen if "encoder" in name]


def test_every_form_of_outputs_is_understood() -> None:
    class WithLogits:
        logits, features = torch.ones(2, 3), torch.zeros(2, 5)

    logits, features = WithLogits.logits, WithLogits.features
    for out in (
        (logits, features),
        {"logits": logits, "features": features, "loss": None},
        WithLogits(),
        Outputs(logits, features, {}),
    ):
        found = outputs_of(out)
        assert found.logits is logits
        assert found.features is features
    for out in (logits, (logits,), (logits, (features, features)), (logits, None, features), {"logits": logits}):
        found = outputs_of(out)
        assert found.logits is logits
        assert found.features is logits


def test_features_are_the_input_of_the_last_linear_layer() -> None:
    model = from_module(lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))
    variables, x = model.init(0), torch.ones(5, 4)
    outputs, _ = model.apply(variables, x, True)
    assert outputs.features.shape == (5, 3)
    assert torch.equal(outputs.features @ variables["2.weight"].T + variables["2.bias"], outputs.logits)


def test_a_buffer_that_a_module_replaces_is_kept() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + len(x)
            return super().forward(x)

    model = from_module(Counting)
    variables = model.init(0)
    _, buffers = model.apply(variables, torch.ones(3, 2), True)
    assert float(buffers["seen"]) == 3
    assert float(variables["seen"]) == 0


def test_samples_are_as_before_after_an_evaluation_by_a_module_that_writes_to_its_input() -> None:
    model, x = (
        from_module(lambda: nn.Sequential(nn.Flatten(), nn.ELU(inplace=True), nn.Linear(3, 2))),
        -torch.ones(4, 3),
    )
    first = model.apply(model.init(0), x, False)[0].logits
    assert torch.equal(model.apply(model.init(0), x, False)[0].logits, first)
    assert torch.equal(x, -torch.ones(4, 3))


def test_variables_are_as_before_after_an_evaluation_by_a_module_that_puts_others_in_their_place() -> None:
    class Clamped(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data.clamp(-0.5, 0.5)
            return super().forward(x)

    model = from_module(lambda: Clamped(1, 2, bias=False))
    variables = {"weight": torch.tensor([[1.0], [-2.0]])}
    with torch.inference_mode():
        logits = [model.apply(variables, torch.ones(1, 1), False)[0].logits.tolist() for _ in range(2)]
    assert logits == [[[0.5, -0.5]]] * 2
    assert variables["weight"].tolist() == [[1.0], [-2.0]]


@pytest.mark.parametrize("changed", ["weight_norm", "prune"])
def test_a_layer_whose_weight_a_hook_makes_of_parameters_is_trained(changed: str) -> None:
    def build() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        if changed == "prune":
            l1_unstructured(module[0], "weight", amount=0.5)  # type: ignore[no-untyped-call]
        else:
            with pytest.deprecated_call():
                weight_norm(module[0])
        return module

    model, plain = from_module(build), under_seed(build, 0)
    x = torch.ones(5, 3)
    for one in (model, copy.deepcopy(model)):
        assert torch.equal(one.apply(model.init(0), x, True)[0].logits, plain(x))
    trained = {name for name in model.init(0) if name not in model.buffers}
    assert trained == {name for name, _ in plain.named_parameters()}
    slopes = torch.func.grad(lambda given: model.apply({**model.init(0), **given}, x, True)[0].logits.sum())(
        without(model.init(0), model.buffers)
    )
    plain(x).sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(slopes[name], parameter.grad)


def test_a_hook_for_a_gradient_is_refused_in_a_sentence() -> None:
    def build() -> nn.Module:
        module = nn.Linear(3, 2)
        module.weight.register_hook(lambda slope: slope / 2)
        return module

    with pytest.raises(ConfigurationError, match=r"^'weight' of the module Linear has a hook for its gradient, which "):
        from_module(build)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize("copied", ["generator", "compiled"])
def test_a_module_that_cannot_be_copied_is_refused_in_a_sentence(copied: str) -> None:
    def build() -> nn.Module:
        module = nn.Linear(3, 2)
        if copied == "compiled":
            return torch.jit.trace(module, torch.ones(1, 3))  # type: ignore[no-any-return, no-untyped-call]
        module.numbers = (number for number in range(3))  # type: ignore[assignment]
        return module

    with pytest.raises(ConfigurationError, match=r"^the module \w+ must be one that copy\.deepcopy can copy, and not "):
        from_module(build)


def test_what_a_constructor_draws_follows_from_the_seed_whoever_draws_it() -> None:
    def build() -> nn.Module:
        module = nn.Linear(3, 1)
        module.bias.data.fill_(random.random())
        module.weight.data.copy_(torch.from_numpy(np.random.randn(1, 3)))
        module.register_buffer("frequencies", torch.randn(2))
        return module

    def drawn(seed: int) -> list[float]:
        return [number for leaf in from_module(build).init(seed).values() for number in leaf.flatten().tolist()]

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    once, other = drawn(7), drawn(2**62)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert once == drawn(7)
    assert len({*once, *other}) == 12


def test_noise_in_evaluation_is_always_the_same() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.randn_like(x))

    model = from_module(lambda: Noisy(2, 2))
    variables, x = model.init(0), torch.ones(3, 2)
    assert torch.equal(model.apply(variables, x, False)[0].logits, model.apply(variables, x, False)[0].logits)


def test_training_at_the_coordinator_draws_by_round_job_and_step(tmp_path: Path) -> None:
    model = from_module(lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(20, 2)))
    variables, x = model.init(0), torch.ones(4, 20)

    def logits(place: Place, step: int) -> Tensor:
        with models_draw_by(Draws(torch.from_numpy(place.key(step)))):
            return model.apply(variables, x, True)[0].logits

    place = Place(tmp_path, 3, 0, 1, seed=7)
    assert torch.equal(logits(place, 0), logits(place, 0))
    for other, step in ((place, 1), (replace(place, round=4), 0), (replace(place, seed=8), 0)):
        assert not torch.equal(logits(place, 0), logits(other, step))
