"""Language models: what they see, their executors and derivatives, and the methods that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus, Split
from fedemu.algorithms.data.language import PAD, masked
from fedemu.algorithms.data.masking import Masking
from fedemu.algorithms.interface import Algorithm, Batch, Facts, Model
from fedemu.algorithms.models.bert import tinybert, tinybert_small
from fedemu.algorithms.models.gru import Gated, gru
from fedemu.algorithms.registry import ALGORITHMS, build_algorithm, build_model
from fedemu.algorithms.replay.sample_gradients import SampleGradients
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy, token_cross_entropy
from fedemu.algorithms.trees import map_leaves
from fedemu.device.compute.executors.executor import Executor
from fedemu.device.compute.executors.serial import Serial
from fedemu.device.compute.executors.vmapped import Vmapped
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.ids import Digest

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")

VOCABULARY, LENGTH, SAMPLES = 24, 8, 30
SHAPE = (2, LENGTH)
FACTS = Facts(*torch.zeros(6), label_counts=torch.zeros(1))
MODELS: dict[str, Callable[[], Model]] = {
    "bert": lambda: tinybert_small(SHAPE, VOCABULARY, layers=1, hidden=8, heads=2, feed_forward=12),
    "gru": lambda: gru(SHAPE, VOCABULARY, embedding=6, hidden=8),
}
TRAIN_TOKENS = ("fedavg", "fedprox", "scaffold", "fednova", "fedcurv")


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]()


@pytest.fixture(scope="module")
def texts() -> Corpus:
    """Texts of 2 to 6 tokens that count upwards, with one masking of each."""
    random = np.random.RandomState(0)
    tokens = np.full((SAMPLES, LENGTH), PAD)
    for row in tokens:
        size = random.randint(2, 7)
        row[: size + 2] = [2, *(5 + (random.randint(15) + np.arange(size)) % 19), 3]
    split = Split(masked(tokens, random, VOCABULARY).astype(np.int16), np.zeros(SAMPLES, np.int64), {})
    words = tuple(map(str, range(VOCABULARY)))
    return Corpus("texts", split, split, ("text",), SHAPE, np.zeros(2), np.ones(2), Digest("0" * 64), words)


def test_logits_are_given_for_every_token(model: Model, texts: Corpus) -> None:
    x, _ = texts.batch(texts.train, np.arange(3))
    outputs, buffers = model.apply(model.init(1), x, True)
    assert outputs.logits.shape == (3, LENGTH, VOCABULARY)
    assert outputs.features.shape == (3, LENGTH, 8)
    assert buffers == {}
    assert model.buffers == frozenset()
    assert model.kind == "sequence"


def test_the_seed_decides_the_variables(model: Model) -> None:
    once, again, other = (model.init(seed) for seed in (1, 1, 2))
    assert all(torch.equal(once[name], again[name]) for name in once)
    assert any(not torch.equal(once[name], other[name]) for name in once)


def test_the_targets_are_not_read(model: Model, texts: Corpus) -> None:
    x, _ = texts.batch(texts.train, np.arange(3))
    changed = x.clone()
    changed[:, 1] = 7
    variables = model.init(1)
    assert torch.equal(model.apply(variables, x, True)[0].logits, model.apply(variables, changed, True)[0].logits)


def test_bert_reads_both_sides_but_no_padding() -> None:
    bert = MODELS["bert"]()
    variables = bert.init(1)
    short = tinybert_small((2, 4), VOCABULARY, layers=1, hidden=8, heads=2, feed_forward=12)
    cut = {name: leaf[:4] if "position_embeddings" in name else leaf for name, leaf in variables.items()}
    x = torch.tensor([[[2, 9, 4, 3, 0, 0, 0, 0], [0] * 8]])
    padded, alone = bert.apply(variables, x, True)[0].logits, short.apply(cut, x[..., :4], True)[0].logits
    torch.testing.assert_close(padded[:, :4], alone)
    after = x.clone()
    after[0, 0, 3] = 9
    assert not torch.allclose(bert.apply(variables, after, True)[0].logits[0, 0], padded[0, 0])


def test_input_and_output_embeddings_of_bert_are_one_leaf() -> None:
    variables = MODELS["bert"]().init(1)
    tables = [name for name, leaf in variables.items() if leaf.shape == (VOCABULARY, 8)]
    assert tables == ["bert.embeddings.word_embeddings.weight"]
    assert [name for name, leaf in variables.items() if leaf.shape == (VOCABULARY,)] == ["cls.predictions.bias"]


def test_tinybert_has_the_size_of_the_paper() -> None:
    variables = build_model("tinybert", {}, (2, 32), 2000).init(0)
    assert sum("attention.self.query.weight" in name for name in variables) == 4
    assert variables["bert.encoder.layer.0.intermediate.dense.weight"].shape == (1200, 312)
    assert variables["bert.embeddings.word_embeddings.weight"].shape == (2000, 312)
    assert sum(leaf.numel() for leaf in variables.values()) == 5_303_936


def test_the_recurrent_layer_is_that_of_torch() -> None:
    layer, other = Gated("g", 5, 7), torch.nn.GRU(5, 7, batch_first=True)
    variables = layer.init(torch.Generator().manual_seed(0))
    names = {"weight_ih_l0": "input.weight", "weight_hh_l0": "state.weight", "bias_ih_l0": "input.bias"}
    named = {**names, "bias_hh_l0": "state.bias"}
    other.load_state_dict({theirs: variables[f"g.{ours}"] for theirs, ours in named.items()})
    x = torch.randn(3, 6, 5, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(layer(variables, x), other(x)[0])


def test_the_recurrent_model_reads_no_later_token(texts: Corpus) -> None:
    model = MODELS["gru"]()
    variables = model.init(1)
    x, _ = texts.batch(texts.train, np.arange(4))
    changed = x.clone()
    changed[:, 0, 5:] = 9
    before, after = (model.apply(variables, given, True)[0].logits for given in (x, changed))
    assert torch.equal(before[:, :5], after[:, :5])


def test_gradients_of_single_samples_are_those_of_one_backward_pass_each(model: Model, texts: Corpus) -> None:
    double = map_leaves(lambda leaf: leaf.double(), model.init(1))
    x, y = texts.batch(texts.train, np.arange(6))
    batch = Batch(x, y, torch.ones(6, dtype=torch.float64))
    rows = []
    for i in range(6):
        inputs = map_leaves(lambda leaf: leaf.clone().requires_grad_(), double)
        logits = model.apply(inputs, x[i : i + 1], False)[0].logits
        loss = token_cross_entropy(logits, Batch(x[i : i + 1], y[i : i + 1], torch.ones(1)), FACTS)
        slopes = torch.autograd.grad(loss, list(inputs.values()))
        rows.append(torch.cat([slope.flatten() for slope in slopes]))
    gradients = torch.stack(rows)
    found = SampleGradients(model, token_cross_entropy, double, batch, FACTS)
    np.testing.assert_allclose(found.gram(), (gradients @ gradients.T).numpy(), rtol=1e-8, atol=1e-10)
    weights = np.array([0.0, 1.0, 0.5, 2.0, 0.0, 0.25])
    total = found.weighted_sum(weights)
    flat = torch.cat([leaf.flatten() for leaf in total.values()])
    torch.testing.assert_close(flat, gradients.T @ torch.from_numpy(weights))
    np.testing.assert_allclose(found.products(total), (gradients @ flat).numpy(), rtol=1e-8, atol=1e-10)


def ingredients(model: Model, **changed: Any) -> Ingredients:
    given: dict[str, Any] = {"classes": 1, "epochs": 2, "batch_size": 5, "lr": 0.05, "devices": 3, "public": True}
    given |= {"augment": Masking(VOCABULARY), "input_shape": SHAPE, "labelled": False, "language": True}
    return Ingredients(**{"model": model, "criterion": token_cross_entropy, **given, **changed})


def played(
    algorithm: Algorithm[Any], model: Model, texts: Corpus, fleet: Callable[..., Any], executor: Executor
) -> Any:
    """Two rounds of three devices, one of which is away in the second."""
    shares = [np.arange(0, 10), np.arange(12, 18), np.arange(20, 30)]
    made = fleet(algorithm, model.init(0), shares, executor=executor)
    made.corpus = texts
    made.play([0, 1, 2])
    made.play([0, 2])
    return made


@pytest.mark.parametrize("name", TRAIN_TOKENS)
def test_methods_without_a_loss_of_classes_train_it(name: str, texts: Corpus, little_fleet: Callable[..., Any]) -> None:
    model = MODELS["gru"]()
    options = {"penalty": 0.01, "samples": 4} if name == "fedcurv" else {}
    fleet = played(build_algorithm(name, options, ingredients(model)), model, texts, little_fleet, Serial())
    before = model.init(0)
    assert {*fleet.model} == {*before}
    assert all(torch.isfinite(leaf).all() for leaf in fleet.model.values())
    assert any(not torch.equal(leaf, before[key]) for key, leaf in fleet.model.items())
    assert 2.0 < fleet.results[0].metrics["loss"] < 4.0


def test_both_executors_train_texts_alike(model: Model, texts: Corpus, little_fleet: Callable[..., Any]) -> None:
    """``Checked`` cannot be used: the gradient of a bias of BERT's keys is 0, so it would compare rounding errors."""
    scaffold = build_algorithm("scaffold", {}, ingredients(model))
    one, stacked = (played(scaffold, model, texts, little_fleet, executor) for executor in (Serial(), Vmapped(2)))
    for mine, theirs in ((one.model, stacked.model), (one.own[0], stacked.own[0])):
        for name, leaf in mine.items():
            torch.testing.assert_close(leaf, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ALGORITHMS.keys() - {*TRAIN_TOKENS}))
def test_methods_with_a_loss_of_classes_refuse_tokens(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^the method '{name}' has a loss of classes, but the data are texts"):
        build_algorithm(name, {}, ingredients(MODELS["gru"]()))


def test_a_criterion_of_the_other_kind_of_data_is_refused() -> None:
    model = MODELS["gru"]()
    with pytest.raises(ConfigurationError, match=r"set algorithm\.loss = 'token_cross_entropy'$"):
        build_algorithm("fedavg", {}, ingredients(model, criterion=cross_entropy))
    with pytest.raises(ConfigurationError, match="predicts tokens, but the data are no texts"):
        build_algorithm("fedavg", {}, ingredients(model, language=False))


@pytest.mark.parametrize("build", [tinybert, tinybert_small, gru])
def test_a_language_model_refuses_images(build: Callable[..., Model]) -> None:
    with pytest.raises(ConfigurationError, match=r"needs texts, but a sample has the shape \(1, 8, 8\)"):
        build((1, 8, 8), 10)


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ConfigurationError, match=r"model\.hidden = 10 can't be divided by model\.heads = 4"):
        build_model("tinybert_small", {"hidden": 10, "heads": 4}, SHAPE, VOCABULARY)
