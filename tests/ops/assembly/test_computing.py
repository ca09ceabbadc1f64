"""Own models that cannot be stacked are computed in another way, which is told and passed on to all machines."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from fedemu.algorithms.interface import Tree
from fedemu.algorithms.trees import flatten
from fedemu.device.compute.executors.executor import Job, JobResult
from fedemu.device.compute.tapes.private_torch import tree_flatten
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.assembly.trainer import open_trainer
from fedemu.ops.assembly.trial import tried_parts
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("tried_here")
OWN = """
    import random

    import numpy as np
    import torch
    from torch import nn
    from torch.nn.utils.parametrizations import spectral_norm
    from torch.utils.checkpoint import checkpoint

    from fedemu.algorithms import PREVIOUS, LocalTerm, cross_entropy

    def noisy(logits, batch, facts):
        return cross_entropy(logits * (random.random() + np.random.rand()), batch, facts)

    def branching(ingredients, later: bool = False):
        def term(model, at):
            if later and PREVIOUS not in at.shared:
                return 0.0
            return at.outputs.logits.mean() if at.outputs.logits.sum() > 0 else at.outputs.logits.square().mean()

        return LocalTerm("branching", term, previous=later)

    class Net(nn.Module):
        def __init__(self, input_shape, classes):
            super().__init__()
            self.first, self.last = nn.Linear(64, 8), nn.Linear(8, classes)

        def forward(self, x):
            return self.last(self.between(torch.relu(self.first(x.flatten(1)))))

        def between(self, h):
            return h

    class Dropping(Net):
        def between(self, h):
            return torch.dropout(h, 0.2, self.training)

    class Centres(nn.Linear):
        def __init__(self, input_shape, classes):
            super().__init__(64, classes)

        def forward(self, x):
            x = x.flatten(1)
            return super().forward(x - x.mean(0))

    class Normalises(nn.Sequential):
        def __init__(self, input_shape, classes):
            norm = nn.BatchNorm1d(64, track_running_stats=False)
            super().__init__(nn.Flatten(), norm, nn.Linear(64, classes))

    class Divides(Net):
        def between(self, h):
            return h / len(h)

    class Branches(Net):
        def between(self, h):
            return h if h.sum() > 0 else -h

    class Scales(Net):
        def between(self, h):
            return h / (1 + h.max().item())

    class Selects(Net):
        def between(self, h):
            return h + h[h > 0].mean()

    class Writes(Net):
        def between(self, h):
            wide = torch.zeros(len(h), 8)
            wide[:, :4] = h[:, :4]
            return wide

    class Spectral(Net):
        def __init__(self, input_shape, classes):
            super().__init__(input_shape, classes)
            self.first = spectral_norm(self.first)

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(context, slope):
            return 2 * context.saved_tensors[0] * slope

    class OldFunction(Net):
        def between(self, h):
            return Square.apply(h)

    class ComputesAgain(Net):
        def __init__(self, input_shape, classes):
            super().__init__(input_shape, classes)
            self.again = nn.Linear(8, 8)

        def between(self, h):
            return checkpoint(self.again, h, use_reentrant=False)

    class ByNumpy(Net):
        def between(self, h):
            return h * float(1 + h.detach().numpy().std())

    class DrawsByPython(Net):
        def between(self, h):
            return h * (random.random() + np.random.rand()) if self.training else h

    class Poisson(Net):
        def between(self, h):
            return h + torch.poisson(torch.ones_like(h)) if self.training else h

    class BranchesAndDraws(Poisson):
        def between(self, h):
            return super().between(h) if h.sum() > 0 else h

    class Decays(Net):
        def between(self, h):
            if self.training:
                with torch.no_grad():
                    self.last.weight.copy_(self.last.weight * 0.9)
            return h

    class Replaces(Net):
        def between(self, h):
            if self.training:
                self.last.weight.data = self.last.weight.data * 0.9
            return h

    class Differentiates(Net):
        def between(self, h):
            if not self.training:
                return h
            noise = torch.rand(h.shape, requires_grad=True)
            with torch.enable_grad():
                return h + torch.autograd.grad((noise**2).sum() * h.sum(), noise)[0]

    class Remembers(Net):
        before = None

        def between(self, h):
            found = h if self.before is None else h + self.before
            self.before = h.detach()
            return found

    class Raises(Net):
        def between(self, h):
            raise ZeroDivisionError("loss is lost")
"""


@pytest.fixture(autouse=True)
def _own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path_factory.getbasetemp() / "trial-cache"))
    (tmp_path / "mine.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def tried(*settings: str) -> tuple[Parts, list[str]]:
    said: list[str] = []
    parts = tried_parts(experiment(*settings), said.append)
    return parts, [line for line in said if "model" in line]


def experiment(*settings: str) -> Experiment:
    return load_experiment("digits-small", list(settings), {})[0]


@pytest.mark.parametrize(
    ("name", "executor", "reason"),
    [
        ("Net", "auto", ""),
        ("Dropping", "auto", ""),
        ("Branches", "serial", "branches on values"),
        ("Scales", "serial", "branches on values"),
        ("Selects", "serial", "makes shapes that depend on values"),
        ("Writes", "serial", "writes in place"),
        ("Spectral", "serial", "writes in place"),
        ("OldFunction", "plain", "has a torch.autograd.Function without setup_context"),
        ("ComputesAgain", "plain", "computes activations again in its backward pass"),
        ("ByNumpy", "plain", "hands values to other libraries"),
        ("DrawsByPython", "plain", "draws random numbers by Python or numpy"),
        ("Poisson", "plain", "draws random numbers that no key can make"),
        ("BranchesAndDraws", "plain", "draws random numbers that no key can make"),
        ("Decays", "auto", ""),
        ("Replaces", "plain", "gives a variable other memory (.data = ...)"),
        ("Differentiates", "plain", "computes gradients itself, by torch.autograd"),
    ],
)
def test_an_own_model_trains_repeatably_by_the_executor_that_is_told(name: str, executor: str, reason: str) -> None:
    parts, said = tried(f"model.name=mine:{name}")
    assert parts.experiment.local.executor == executor
    ways = {"serial": "devices are computed one by one", "plain": "in torch's ordinary way (executor 'plain')"}
    assert len(said) == (executor != "auto")
    for line in said:
        assert line.startswith(f"model 'mine:{name}' {reason}")
        assert line.endswith(ways[executor])
        assert "mine.py:" in line or "Python" in line
    results = []
    for round in (1, 1, 2):
        trainer = open_trainer(parts.experiment.to_bytes(), "cpu")
        job = Job(device=3, round=round, task=0, indices=np.arange(12))
        [result] = trainer.run("train", {"model": parts.variables}, [job])
        assert isinstance(result, JobResult), result
        results.append([leaf.numpy().tobytes() for leaf in tree_flatten(dict(result.payload["delta"]))[0]])
    assert results[0] == results[1]
    assert results[0] != results[2]  # another order of the samples, and other draws


@pytest.mark.parametrize(
    ("settings", "executor", "reason"),
    [
        (["algorithm.loss=mine:noisy"], "plain", "loss 'mine:noisy' draws random numbers by Python or numpy"),
        (["algorithm.terms={'mine:branching'={}}"], "serial", "local term 'mine:branching' branches on values"),
        (
            ["algorithm.terms={'mine:branching'={later=true}}", "stream={kind='classes',tasks=5}"],
            "serial",
            "local term 'mine:branching' branches on values",
        ),
    ],
)
def test_an_own_loss_or_term_is_computed_by_the_executor_that_can(
    settings: list[str], executor: str, reason: str
) -> None:
    said: list[str] = []
    parts = tried_parts(experiment(*settings), said.append)
    assert parts.experiment.local.executor == executor
    assert said[-1].startswith(reason)


@pytest.mark.parametrize("executor", ["vmapped", "checked"])
def test_an_executor_that_cannot_repeat_draws_by_python_is_refused(executor: str) -> None:
    with pytest.raises(ConfigurationError, match=f"by Python or numpy, so local.executor = '{executor}' can't compute"):
        tried_parts(experiment("algorithm.loss=mine:noisy", f"local.executor={executor}"), print)


@pytest.mark.parametrize("name", ["Centres", "Normalises", "Divides"])
def test_a_model_that_mixes_samples_trains_alike_by_every_executor(name: str) -> None:
    sizes = (1, 3, 11)
    found: dict[str, list[Tree]] = {}
    settings = f"model.name=mine:{name}", "local.batch_size=8", "local.weight_decay=0"
    for executor in ("serial", "vmapped", "plain"):
        parts, said = tried(*settings, f"local.executor={executor}")
        assert said == [
            f"model 'mine:{name}' mixes the samples of a batch, so all batches are filled up to local.batch_size "
            "with copies that have no weight in the loss"
        ]
        assert parts.experiment.local.executor == executor
        trainer = open_trainer(parts.experiment.to_bytes(), "cpu")
        jobs = [Job(device=i, round=1, task=0, indices=np.arange(size)) for i, size in enumerate(sizes)]
        results = trainer.run("train", {"model": parts.variables}, jobs)
        found[executor] = [flatten(result.payload) for result in results if isinstance(result, JobResult)]
        assert len(found[executor]) == len(sizes)
    for alone, stacked, plain in zip(*found.values(), strict=True):
        largest = max(float(leaf.abs().max()) for leaf in alone.values())
        for leaf, expected in alone.items():
            torch.testing.assert_close(stacked[leaf], expected, rtol=0, atol=1e-4 * largest)
            torch.testing.assert_close(plain[leaf], expected, rtol=0, atol=1e-4 * largest)
    if name == "Centres":
        # A sample alone is its own mean, and so are its copies: the weights see 0, and learn nothing.
        assert float(found["serial"][0]["delta/weight"].abs().max()) < 1e-6
        assert float(found["serial"][0]["delta/bias"].abs().max()) > 1e-2


def test_what_a_model_writes_to_its_parameters_in_training_counts_in_every_executor() -> None:
    found: dict[str, Tree] = {}
    for name, executor in (("Decays", "vmapped"), ("Decays", "serial"), ("Decays", "plain"), ("Replaces", "plain")):
        parts, _ = tried(f"model.name=mine:{name}", f"local.executor={executor}", "local.epochs=3", "local.lr=0.001")
        trainer = open_trainer(parts.experiment.to_bytes(), "cpu")
        [result] = trainer.run("train", {"model": parts.variables}, [Job(3, 1, 0, np.arange(10))])
        assert isinstance(result, JobResult), result
        found[f"{name} {executor}"] = flatten(result.payload)
    expected = found["Decays vmapped"]
    # Three steps of training hardly move the weights, and three decays to 90 % move them by 27.1 %.
    decayed = -(1 - 0.9**3) * parts.variables["last.weight"]
    torch.testing.assert_close(expected["delta/last.weight"], decayed, rtol=0, atol=5e-3)
    for each in found.values():
        for name, leaf in expected.items():
            torch.testing.assert_close(each[name], leaf, rtol=0, atol=1e-6)


def test_a_model_that_keeps_something_from_batch_to_batch_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'mine:Remembers' gives other logits when it is applied to the same"):
        tried("model.name=mine:Remembers")


def test_an_error_in_every_executor_is_told_as_it_is() -> None:
    with pytest.raises(ConfigurationError, match=r"ZeroDivisionError: loss is lost, mine.py:\d+"):
        tried("model.name=mine:Raises")


def test_an_executor_that_the_experiment_names_is_taken_or_refused() -> None:
    assert tried("model.name=mine:Branches", "local.executor=serial")[1] == []
    assert tried("model.name=mine:OldFunction", "local.executor=plain")[1] == []
    with pytest.raises(ConfigurationError, match=r"local\.executor = 'vmapped' can't compute it"):
        tried("model.name=mine:Branches", "local.executor=vmapped")
