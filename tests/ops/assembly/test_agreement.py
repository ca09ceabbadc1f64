"""The digest on which the machines of a fleet have to agree."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from fedemu.algorithms.models.frozen import frozen_of
from fedemu.algorithms.trees import model_digest
from fedemu.ops.assembly.agreement import common, prepare
from fedemu.ops.assembly.learning import open_model
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment
from fedemu.protocol.ids import Digest

MODULE = """
import torch
from torch import nn

def network(shape, classes, shift: float = 0.0, frozen: bool = True):
    below, head = nn.Linear(64, 5), nn.Linear(5, classes)
    with torch.no_grad():
        below.bias += shift
    return nn.Sequential(nn.Flatten(), below.requires_grad_(not frozen), head)
"""


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path_factory.getbasetemp() / "agreement-cache"))
    monkeypatch.chdir(tmp_path)
    Path("freezing.py").write_text(MODULE)


def of(seed: int = 1, **model: object) -> Digest:
    return prepare(Experiment.parse({"seed": seed, "model": {"name": "freezing.py:network", **model}}).to_bytes())


def test_without_frozen_tensors_it_is_the_digest_of_the_data() -> None:
    data = open_corpus(Experiment()).digest
    assert prepare(Experiment().to_bytes()) == data
    assert of(frozen=False) == data


def test_frozen_tensors_count_and_follow_from_the_seed() -> None:
    assert of() == of()
    assert len({of(), of(seed=2), of(shift=0.5), of(frozen=False)}) == 4


@pytest.mark.parametrize("model", ["mlp", "cnn", "random_features"])
def test_a_machine_agrees_with_the_coordinator_whichever_model_of_fedemu_it_is(model: str) -> None:
    experiment = Experiment.parse({"model": {"name": model}})
    corpus = open_corpus(experiment)
    assert prepare(experiment.to_bytes()) == common(corpus.digest, frozen_of(open_model(experiment, corpus)))


def test_the_digest_of_both() -> None:
    data, frozen = Digest("ab" * 32), {"w": torch.ones(2)}
    assert common(data, frozen) == hashlib.sha256(f"{data} {model_digest(frozen)}".encode()).hexdigest()
    assert common(data, {}) == data
