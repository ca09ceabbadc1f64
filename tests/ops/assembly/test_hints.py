"""What fits together, but is perhaps not meant so, is told in a line before the run."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Labelled, PublicData
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.ops.assembly.hints import untrained
from fedemu.ops.assembly.trial import tried_parts
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment

pytestmark = pytest.mark.usefixtures("tried_here", "forks")
LOSSES = """
    import torch
    from torch import nn

    from fedemu.algorithms import cross_entropy

    class Scaled(nn.Module):
        def __init__(self, frozen):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()), requires_grad=not frozen)

        def forward(self, logits, batch, facts):
            return cross_entropy(logits * self.scale, batch, facts)

    scaled, frozen = Scaled(False), Scaled(True)
"""
NET = """
    from torch import nn

    class Net(nn.Module):
        def __init__(self, input_shape, classes):
            super().__init__()
            self.table, self.top = nn.Embedding(40, 4), nn.Linear(4, classes)

        def forward(self, x):
            return self.top(self.table(x).mean(1))
"""


def experiment(*settings: str) -> Experiment:
    return load_experiment("digits-small", list(settings), {})[0]


@pytest.mark.parametrize(("share", "warned"), [(0.0, True), (0.1, False)])
def test_an_evaluation_on_validation_samples_that_nobody_has_is_told(share: float, warned: bool) -> None:
    said: list[str] = []
    tried_parts(experiment("evaluate.validation=true", f"data.validation={share}"), said.append)
    told = "warning: evaluate.validation has no effect, because no device holds samples back; raise data.validation"
    assert (told in said) == warned


@pytest.mark.parametrize(
    ("overrides", "warned"),
    [
        (["algorithm.name=afl"], True),
        (["algorithm.name=afl", "algorithm.options.warm_up=1"], False),
        (["algorithm.name=central", "data.public.fraction=0.2"], True),
        (["algorithm.name=fedprox"], False),
    ],
)
def test_a_diagnosis_of_models_that_nobody_sends_is_told(overrides: list[str], warned: bool) -> None:
    said: list[str] = []
    told = tried_parts(experiment("diagnose.every=1", *overrides), said.append).experiment
    why = f"no device sends a model with the method {told.algorithm.name!r}"
    assert (f"warning: diagnose.every has no effect, because {why}" in said) == warned


@pytest.mark.parametrize(("shape", "warned"), [((28, 20, 3), True), ((3, 28, 20), False), ((1, 8, 1), False)])
def test_images_whose_channels_come_last_are_told(
    shape: tuple[int, ...], warned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    x, y = np.random.default_rng(0).integers(0, 255, (200, *shape), np.uint8), np.arange(200) % 10
    np.savez(tmp_path / "images.npz", x=x, y=y)
    (tmp_path / "images.py").write_text(
        "import numpy as np\n\ndef load():\n    return dict(np.load(__file__.replace('.py', '.npz')))\n"
    )
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    tried_parts(experiment("data.dataset=images.py:load", "data.partition={kind='iid'}"), said.append)
    channels, height, width = shape
    told = (
        f"warning: samples of shape {list(shape)} are images with {channels} channels of {height} × {width} pixels; if "
        "their channels come last, move them to the front, as by x.transpose(0, 3, 1, 2)"
    )
    assert (told in said) == warned


@pytest.mark.parametrize(("step", "warned"), [(1, False), (2, True)])
def test_classes_without_a_sample_to_train_on_are_told(
    step: int, warned: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        f"import numpy as np\n\ny = np.arange(300) % 3 * {step}\npair = (np.ones((300, 4), np.float32), y)\n"
    )
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    tried_parts(experiment("data.dataset=mine.py:pair", "data.partition={kind='iid'}"), said.append)
    told = (
        "warning: 2 of 5 classes have no sample to train on: '1', '3'; where y is an array of whole numbers, every "
        "number from 0 to the largest is a class"
    )
    assert (told in said) == warned


def test_columns_without_numbers_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    names = ["a", "label", *(f"c{n}" for n in range(12))]
    rows = [[i % 10, i % 10, *"x" * 12] for i in range(200)]
    (tmp_path / "t.csv").write_text("\n".join(",".join(map(str, row)) for row in [names, *rows]))
    said: list[str] = []
    tried_parts(experiment("data.dataset=t.csv", "data.partition={kind='iid'}"), said.append)
    assert said[-1] == (
        "warning: no part of a sample, because it holds no numbers: 'c0', 'c1', 'c2', 'c3', 'c4', 'c5', 'c6', 'c7', "
        "'c8', 'c9' and 2 more; make numbers of it, with a decimal point or by one-hot codes, if it should count"
    )


@pytest.mark.parametrize("text", ["none", "labels"])
def test_settings_of_a_test_split_are_told_where_the_data_have_their_own(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f"{i % 5},w{i % 5},{i % 2},p{i % 4},{'test' if i % 5 == 4 else 'train'}" for i in range(400)]
    settings = [f"data.text.kind={text}", "data.text.tokenizer=characters", "data.partition={kind='iid'}"]
    if text == "labels":
        (tmp_path / "net.py").write_text(textwrap.dedent(NET))
        settings += ["model={ name = 'net.py:Net' }"]
    asked = ["data.test_fraction=0.3", "data.test_by=id", "data.id_column=person"]

    def told(content: list[str], *overrides: str) -> list[str]:
        (tmp_path / "t.csv").write_text("\n".join(["a,text,label,person,split", *content]))
        said: list[str] = []
        tried_parts(experiment("data.dataset=t.csv", *settings, *overrides), said.append)
        return [line for line in said if "data.test_" in line]

    own = "because 't.csv' has a test split of its own"
    assert told(rows) == []
    assert told(rows, *asked) == [
        f"warning: data.test_fraction = 0.3 has no effect, {own}",
        f'warning: data.test_by = "id" has no effect, {own}',
    ]
    assert told(rows, *asked, "data.train_split=train+test") == []
    assert told([row.replace("test", "train") for row in rows], *asked) == []


@pytest.mark.parametrize(
    ("train", "validation", "said"),
    [
        ([0, 2], [3, 1, 2], ""),
        ([0, 2], [3, 0], "none of the 2 public samples for validation is of a class that comes before period 2;"),
        ([3, 1, 1], [0], "none of the 3 public samples to train on is of a class that comes before period 3;"),
    ],
)
def test_tasks_that_begin_before_public_data_of_their_classes_are_told(
    train: list[int], validation: list[int], said: str
) -> None:
    public = PublicData(*(Labelled(torch.zeros(len(part), 1), torch.tensor(part)) for part in (train, validation)))
    still = mlp((1,), 4, (2,))
    line = untrained(public, growing(still, ClassTasks.of(4, 4, [2, 0, 3, 1]), (1,)))
    assert line.startswith(f"warning: {said}" if said else "")
    assert bool(line) == bool(said)
    assert untrained(public, still) == untrained(None, still) == ""


@pytest.mark.parametrize(("loss", "told"), [("losses.py:scaled", 1), ("losses.py:frozen", 0), ("cross_entropy", 0)])
def test_parameters_of_a_loss_that_nobody_trains_are_told(
    loss: str, told: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "losses.py").write_text(textwrap.dedent(LOSSES))
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    tried_parts(experiment(f"algorithm.loss={loss}"), said.append)
    assert (
        sum(line.startswith("warning: nobody trains 'scale' of the loss 'losses.py:scaled': ") for line in said) == told
    )
