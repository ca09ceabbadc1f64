"""Model, criterion and method, put together from an experiment's settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor, nn

from fedemu.algorithms.methods.fedavg import FedAvg
from fedemu.algorithms.models.growing import Growing
from fedemu.algorithms.registry import BIDIRECTIONAL, CLASSIFIERS
from fedemu.algorithms.training.local_sgd import LocalSGD
from fedemu.ops.assembly.learning import open_algorithm
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(Path(tmp_path_factory.getbasetemp()) / "learning-cache"))


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
