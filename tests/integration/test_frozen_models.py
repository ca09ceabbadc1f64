"""Runs of a module with a frozen backbone below a head that is trained: what travels, what changes, what is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedemu.algorithms.models.growing import SEEN
from fedemu.algorithms.models.torch_module import under_seed
from fedemu.algorithms.trees import model_digest
from fedemu.ops.data.corpora import open_corpus
from fedemu.ops.experiment import Experiment
from fedemu.ops.stress.fleet import LiveFleet
from fedemu.protocol import seeds

MODULE = """
from torch import nn
from safetensors.torch import load_file


class Tuned(nn.Module):
    def __init__(self, shape, classes, weights: str = ""):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(144, 16)
        )
        if weights:
            self.backbone.load_state_dict(load_file(weights))
        self.backbone.requires_grad_(False)
        self.head = nn.Linear(16, classes)

    def forward(self, x):
        features = self.backbone(x).relu()
        return self.head(features), features
"""
HEAD = {"head.weight", "head.bias"}
HEAD_BYTES = 4 * (16 * 10 + 10)
MODEL = "model={name='tuned_here:Tuned'}"
SHORT = ("fleet.devices=6", "fleet.per_round=3", "rounds=3", "local.weight_decay=0.1", "local.momentum=0.9")


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[nn.Module]:
    """The class ``Tuned`` of ``MODULE``, which experiments name as ``tuned_here:Tuned``."""
    (tmp_path / "tuned_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import tuned_here  # type: ignore[import-not-found]

    found: type[nn.Module] = tuned_here.Tuned
    return found


def read(directory: str) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Tensor]]:
    """The rows, the summary and the saved tensors of a run."""
    rows = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((Path(directory) / "summary.json").read_text())
    return rows, summary, load_file(Path(directory) / "model.safetensors")


def drawn(module: type[nn.Module], seed: int) -> nn.Module:
    """The module as an experiment of this seed begins with it."""
    return under_seed(lambda: module((1, 8, 8), 10), seeds.integer(seed, purpose="model"))


def test_a_frozen_backbone_stays_as_the_seed_drew_it_and_is_saved_with_the_head(
    in_one_process: Callable[..., Any], module: type[nn.Module]
) -> None:
    in_one_process(Path("run"), MODEL, *SHORT, "seed=5")
    rows, summary, saved = read("run")
    before = drawn(module, 5).state_dict()
    assert {name for name, leaf in saved.items() if not torch.equal(leaf, before[name])} == HEAD
    assert summary["model_digest"] == model_digest(saved)
    for row in rows:
        assert row["accepted"] == 3
        assert 3 * HEAD_BYTES <= row["bytes_up"] < 3 * (HEAD_BYTES + 400)
        assert row["bytes_down"] < row["selected"] * (HEAD_BYTES + 400)
    whole = module((1, 8, 8), 10)
    whole.load_state_dict(saved, strict=True)
    corpus = open_corpus(Experiment())
    x, y = corpus.batch(corpus.test, np.arange(len(corpus.test)))
    right = whole.eval()(x)[0].argmax(-1) == y
    assert float(right.float().mean()) == pytest.approx(summary["final_accuracy"])


def test_processes_of_a_fleet_build_the_same_frozen_parts(
    in_one_process: Callable[..., Any], new_fleet: Callable[..., LiveFleet]
) -> None:
    """The fleet compares its digest of data and frozen tensors with the coordinator's before it trains."""
    settings = ("model.name=tuned_here:Tuned", "rounds=1", "fleet.devices=2", "fleet.per_round=1")
    in_one_process(Path("alone"), *settings)
    fleet = new_fleet(*settings)
    fleet.start_coordinator()
    fleet.start_devices(2, "--trainers", "1", "--allow-code", "tuned_here")
    assert fleet.wait_for_end() == 0, fleet.tail()
    assert fleet.summary()["model_digest"] == read("alone")[1]["model_digest"]


@pytest.mark.parametrize("part", ["scaffold", "fedntd"])
def test_methods_leave_a_pre_trained_backbone_alone(
    in_one_process: Callable[..., Any], module: type[nn.Module], part: str
) -> None:
    weights = module((1, 8, 8), 10).backbone.state_dict()  # drawn without a seed: the file decides
    save_file(weights, "weights.safetensors")
    model = "model={name='tuned_here:Tuned', weights='weights.safetensors'}"
    in_one_process(Path("run"), model, *SHORT, experiment=f"digits-small+{part}")
    rows, _, saved = read("run")
    assert all(torch.equal(saved[f"backbone.{name}"], leaf) for name, leaf in weights.items())
    sent = 2 if part == "scaffold" else 1
    assert rows[-1]["bytes_up"] < 3 * (sent * HEAD_BYTES + 500)


@pytest.mark.parametrize("part", ["mfcl", "scaffold"])
def test_a_frozen_backbone_goes_with_classes_that_come_task_by_task(
    in_one_process: Callable[..., Any], module: type[nn.Module], part: str
) -> None:
    short = ("stream.tasks=2", "stream.rounds_per_task=1", "rounds=2", "fleet.devices=4", "fleet.per_round=2")
    own = ("algorithm.options.iterations=3",) if part != "scaffold" else ()
    in_one_process(Path("run"), MODEL, *short, *own, "seed=5", experiment=f"digits-tasks+{part}")
    _, summary, saved = read("run")
    before = drawn(module, 5).state_dict()
    assert summary["outcome"] == "completed"
    changed = {name for name, leaf in saved.items() if name not in before or not torch.equal(leaf, before[name])}
    assert {name for name in changed if not name.startswith("watched.")} == HEAD | {SEEN}
