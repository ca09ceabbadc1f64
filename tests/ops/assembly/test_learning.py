"""Model, criterion and method, put together from an experiment's settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from fedemu.algorithms.methods.fedavg import FedAvg
from fedemu.algorithms.models.growing import Growing
from fedemu.algorithms.registry import BIDIRECTIONAL, CLASSIFIERS
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.ops.assembly import learning
from fedemu.ops.assembly.learning import open_algorithm, require_fitting_options
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.presets import example_of, part_names, preset, preset_names
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.code.named import load
from fedemu.protocol.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(Path(tmp_path_factory.getbasetemp()) / "learning-cache"))


def test_the_options_of_every_preset_fit_and_those_of_somebodys_own_are_left_to_the_run() -> None:
    for name in [*preset_names(), *map(example_of, part_names())]:
        require_fitting_options(Experiment.parse(preset(name)))
    own = {"model": {"name": "nowhere:Net", "depth": 2}, "algorithm": {"name": "nowhere:Own", "options": {"x": 1}}}
    require_fitting_options(Experiment.parse(own))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("model.hiden=[8]", "'mlp' has no option model.hiden; did you mean 'hidden'?"),
        ("model.name=mlq", r"model 'mlq' is none of mlp, .*; did you mean 'mlp'\?"),
        ("algorithm.options.mu=1", "'fedavg' has no option algorithm.options.mu; it has no options"),
        ("algorithm.name=fedprox algorithm.options.mu=x", "algorithm.options.mu = 'x' does not fit 'fedprox': "),
        ("algorithm.terms={ewc={lamda=1}}", "'ewc' has no option algorithm.terms.ewc.lamda; "),
    ],
)
def test_an_option_that_does_not_fit_is_refused_before_there_are_data(settings: str, said: str) -> None:
    experiment, _ = load_experiment("digits", settings.split(), {})
    with pytest.raises(ConfigurationError, match=f"^{said}"):
        require_fitting_options(experiment)


def test_the_default_experiment_is_fedavg_on_digits() -> None:
    experiment = Experiment()
    model, algorithm = open_algorithm(experiment, open_corpus(experiment))
    assert isinstance(algorithm, FedAvg)
    local = algorithm.programs["train"]
    assert isinstance(local, LocalSGD)
    assert (local.epochs, local.batch_size, local.lr, local.augment) == (5, 10, 0.1, None)
    assert sum(leaf.numel() for leaf in model.init(0).values()) == 4_810


def test_local_settings_reach_the_program() -> None:
    experiment = Experiment.parse(
        {
            "model": {"name": "cnn"},
            "local": {
                "momentum": 0.9,
                "weight_decay": 0.01,
                "lr_decay": 0.5,
                "augment": ["flip"],
            },
        }
    )
    corpus = open_corpus(experiment)
    _, algorithm = open_algorithm(experiment, corpus)
    local = algorithm.programs["train"]
    assert isinstance(local, LocalSGD)
    assert (local.momentum, local.weight_decay, local.learning_rate(2, 0)) == (0.9, 0.01, 0.05)
    assert local.augment is not None


def test_every_setting_of_local_training_and_of_replay_reaches_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def noted(*arguments: Any) -> Any:
        given.append(arguments)
        return arguments[2] if isinstance(arguments[0], str) else arguments[0]

    monkeypatch.setattr(learning, "build_algorithm", noted)
    monkeypatch.setattr(learning, "with_replay", noted)
    stream = {"kind": "periods", "periods": 3, "rounds_per_period": 2}
    experiment = Experiment.parse(
        {
            "rounds": 6,
            "data": {"public": {"fraction": 0.1}},
            "fleet": {"devices": 17, "per_round": 2},
            "algorithm": {"name": "fedprox", "options": {"mu": 0.25}},
            "local": {
                "epochs": 3,
                "steps": 4,
                "batch_size": 6,
                "lr": 0.5,
                "momentum": 0.25,
                "weight_decay": 0.125,
                "lr_decay": 0.75,
                "lr_restart": True,
                "precision": "bfloat16",
            },
            "stream": stream,
            "replay": {
                "strategy": "fixed_proportion",
                "capacity": 9,
                "budget": 8,
                "proportion": 0.75,
                "restarts": 7,
                "iterations": 5,
                "targets": "each",
                "final": "convex",
                "objective": "always",
                "census": False,
                "memory_mib": 3,
            },
        }
    )
    model, _ = open_algorithm(experiment, open_corpus(experiment))
    (name, options, ingredients, _), (_, replay, exact) = given
    assert (name, options) == ("fedprox", {"mu": 0.25})
    assert ingredients.model is not model, "it computes in bfloat16"
    expected = Ingredients(
        model=ingredients.model,
        criterion=cross_entropy,
        classes=10,
        epochs=3,
        local_steps=4,
        batch_size=6,
        lr=0.5,
        momentum=0.25,
        weight_decay=0.125,
        lr_decay=0.75,
        devices=17,
        public=True,
        input_shape=(1, 8, 8),
        rounds_per_task=2,
        kept=8,
    )
    assert ingredients == expected
    assert exact == replace(expected, model=model), "samples are selected by the exact model"
    assert replay == ReplaySettings(
        strategy="fixed_proportion",
        budget=8,
        capacity=9,
        proportion=0.75,
        restarts=7,
        iterations=5,
        targets="each",
        final="convex",
        objective="always",
        census=False,
        memory=3 * 2**20,
        periods=3,
    )
    cumulative = Experiment.parse({"stream": {**stream, "cumulative": True}})
    open_algorithm(cumulative, open_corpus(cumulative))
    assert (given[-1][2].cumulative, given[-1][2].kept, given[-1][2].rounds_per_task) == (True, 0, 0)


def test_a_batch_is_not_padded_beyond_all_samples() -> None:
    experiment = Experiment.parse({"local": {"batch_size": 10**9}})
    corpus = open_corpus(experiment)
    _, algorithm = open_algorithm(experiment, corpus)
    local = algorithm.programs["train"]
    assert isinstance(local, LocalSGD)
    assert local.batch_size == len(corpus.train.y)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"model": {"name": "mpl"}}, "did you mean 'mlp'?"),
        ({"model": {"name": "mlp", "depth": 3}}, "'mlp' has no option model.depth"),
        ({"model": {"name": "lenet"}}, "at least 12×12 pixels, not 8×8"),
        ({"algorithm": {"name": "fedporx"}}, "algorithm 'fedporx' is none of"),
        ({"algorithm": {"loss": "nowhere:loss"}}, "'nowhere' can't be imported"),
        ({"algorithm": {"options": {"mu": 1}}}, "has no option algorithm.options.mu"),
    ],
)
def test_wrong_settings_are_named(table: dict[str, object], sentence: str) -> None:
    experiment = Experiment.parse(table)
    with pytest.raises(ConfigurationError) as caught:
        open_algorithm(experiment, open_corpus(experiment))
    assert sentence in str(caught.value)


@pytest.mark.parametrize("model", CLASSIFIERS)
def test_a_model_of_labels_is_refused_for_texts(model: str) -> None:
    corpus = replace(open_corpus(Experiment.parse({})), vocabulary=("[PAD]", "a"))
    with pytest.raises(ConfigurationError, match=r"the data are texts .* choose model 'gru'"):
        open_algorithm(Experiment.parse({"model": {"name": model}}), corpus)


@pytest.mark.parametrize("model", BIDIRECTIONAL)
def test_a_model_that_reads_both_sides_is_not_asked_for_the_next_token(model: str) -> None:
    experiment = Experiment.parse({"model": {"name": model}, "data": {"text": {"kind": "next"}}})
    corpus = replace(open_corpus(Experiment.parse({})), vocabulary=("[PAD]", "a"))
    with pytest.raises(ConfigurationError, match=r"reads the tokens .* choose model 'gru'"):
        open_algorithm(experiment, corpus)


class Words(nn.Module):
    """Tells the label of a text from its tokens, which are whole numbers."""

    def __init__(self, input_shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.table, self.top = nn.Embedding(20, 4), nn.Linear(4, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.top(self.table(tokens.flatten(1)).mean(1))
        return logits


def test_a_model_of_tokens_goes_with_methods_and_streams_that_look_into_models() -> None:
    corpus = open_corpus(Experiment())
    whole = replace(corpus.train, x=corpus.train.x.astype(np.int16))
    corpus = replace(corpus, train=whole, test=whole)
    table = {"model": {"name": f"{__name__}:Words"}, "stream": {"kind": "classes", "tasks": 5}}
    for name in ("moon", "ncm"):
        model, _ = open_algorithm(Experiment.parse({**table, "algorithm": {"name": name}}), corpus)
        assert isinstance(model, Growing)
        open_algorithm(Experiment.parse({"model": table["model"], "algorithm": {"name": name}}), corpus)


DRAWING = """
import random
import numpy as np
import torch
from fedemu.algorithms import FedAvg, LocalTerm

def drawn():
    return torch.rand(()).item(), np.random.random(), random.random()

IMPORTED, METHODS, TERMS = drawn(), [], []

class Method(FedAvg):
    def __init__(self, ingredients):
        super().__init__(ingredients)
        METHODS.append(drawn())

def held(ingredients):
    TERMS.append(drawn())
    return LocalTerm("held", lambda model, at: at.facts.lr * 0, previous=False)
"""


def test_what_a_method_and_a_term_draw_when_they_are_built_follows_from_the_seed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = open_corpus(Experiment())
    for file in ("one.py", "two.py"):
        Path(file).write_text(DRAWING)
        named = {"name": f"{file}:Method", "terms": {f"{file}:held": {}}}
        for seed in (1, 1, 2):
            open_algorithm(Experiment.parse({"seed": seed, "algorithm": named}), corpus)
    assert load("one.py:IMPORTED") == load("two.py:IMPORTED")
    for built in ("METHODS", "TERMS"):
        first, again, other = load(f"one.py:{built}")
        assert first == again != other
        assert load(f"two.py:{built}") == [first, again, other]
