"""The trial finds what cannot be computed, before any device is started."""

from __future__ import annotations

import errno
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from fedemu.algorithms.trees import map_leaves
from fedemu.ops.assembly.computing import Computing
from fedemu.ops.assembly.parts import Parts
from fedemu.ops.assembly.trial import try_out
from fedemu.ops.experiment.presets import methods
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("slots_tried", "forks")
HERE = pytest.mark.usefixtures("tried_here")
OWN = """
    import os
    import random
    import signal
    from dataclasses import dataclass

    import numpy as np
    import torch
    from torch import nn

    from fedemu.algorithms import Ask, Importance, LocalSGD, LocalTerm, Outcome, Outputs, weighted_mean
    from fedemu.algorithms.methods.fedavg import FedAvg

    class Linear(nn.Module):
        def __init__(self, input_shape, classes, more: int = 0):
            super().__init__()
            self.layer = nn.Linear(64, classes + more)

        def forward(self, x):
            return self.layer(x.flatten(1))

    class PerText(nn.Module):
        def __init__(self, input_shape, tokens):
            super().__init__()
            self.layer = nn.Linear(20, tokens)

        def forward(self, x):
            return self.layer(x.flatten(1).float())

    class Raises(Linear):
        def forward(self, x):
            raise ValueError("not today")

    class RaisesInTraining(Linear):
        def forward(self, x):
            if self.training:
                raise ValueError("not today. Tomorrow perhaps.")
            return super().forward(x)

    class Branches(Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > 0 else super().forward(-x)

    class Tall(Linear):
        def forward(self, x):
            return super().forward(x)[:, None]

    class Whole(Linear):
        def forward(self, x):
            return super().forward(x).long()

    class Detaches(Linear):
        def forward(self, x):
            return super().forward(x).detach(), x.flatten(1)

    class Writes(Linear):
        def forward(self, x):
            torch.rand(())
            self.layer.weight.add_(1)
            return super().forward(x)

    class Remembers(Linear):
        before = 0

        def forward(self, x):
            self.before = self.before if self.training else self.before + x.mean()
            return super().forward(x + self.before)

    class Warms(Linear):
        # What it keeps changes the logits from the fourth batch on.
        def __init__(self, input_shape, classes, kept: str = "", training: bool = True):
            super().__init__(input_shape, classes)
            self.counts, self.seen, self.of_training = {"batches": 0}, [], training
            self.kept = kept

        def forward(self, x):
            if self.training == self.of_training:
                if self.kept == "a count":
                    self.counts["batches"] += 1
                if self.kept == "a list":
                    self.seen.append(len(x))
                if self.kept == "a mean":
                    self.mean = 0.9 * getattr(self, "mean", 0) + x.mean().detach()
                if self.kept == "a cache":
                    self.counts.setdefault(len(x), torch.ones(len(x), 1))
                self.last = x.mean().detach()
            late = self.counts["batches"] > 3 or len(self.seen) > 3
            return super().forward(x * (0.1 if late else 1.0))

    class Halves(Linear):
        def forward(self, x):
            return super().forward(x.mul_(0.5))

    class Exits(Linear):
        def forward(self, x):
            return exit(3) if self.training else super().forward(x)

    class Dies(Linear):
        def forward(self, x):
            os.kill(os.getpid(), signal.SIGKILL)

    class Counts(Linear):
        def __init__(self, input_shape, classes, kind):
            super().__init__(input_shape, classes)
            self.register_buffer("count", torch.zeros(1, dtype=getattr(torch, kind)))

        def forward(self, x):
            if self.training:
                self.count += 1
            return super().forward(x)

    class LacksMemory(Linear):
        def forward(self, x):
            raise MemoryError

    class Table(nn.Module):
        def __init__(self, input_shape, classes, rows: int = 40):
            super().__init__()
            self.table = nn.Embedding(rows, 4)
            self.top = nn.Linear(4, classes)

        def forward(self, x):
            return self.top(self.table(x).mean(1))

    def tokens():
        x = (torch.arange(300).reshape(100, 3) * 7) % 40
        x[70, 1] = 40
        return x, torch.arange(100) % 2

    def quantities():
        return torch.arange(100).reshape(50, 2), torch.arange(50) % 2

    def one_class():
        return torch.ones(50, 3), torch.zeros(50, dtype=torch.int64)

    def vector(logits, batch, facts):
        return logits.logsumexp(-1)

    def per_row(logits, batch, facts):
        chances = logits.log_softmax(-1).gather(1, batch.y[:, None])[:, 0]
        return -(chances * batch.weight).sum() / len(batch.y)

    def not_today(logits, batch, facts):
        raise ValueError("not today")

    def important(ingredients, value="norm", strength="square"):
        norm, vector = (lambda logits, *rest: logits.norm()), (lambda logits, *rest: logits)
        values = {"norm": norm, "vector": vector, "raises": not_today}
        importance = Importance(values[value], getattr(torch.Tensor, strength), 5, 1.0)
        return LocalTerm("mine", lambda model, at: at.facts.lr.new_zeros(()), importance=importance)

    calls = []

    def counts(logits, batch, facts):
        calls.append(1)
        return logits.square().sum() * len(calls)

    def counting(ingredients):
        return LocalTerm("counting", lambda model, at: counts(at.outputs.logits, at.batch, at.facts), previous=False)

    class Unseeded(FedAvg):
        def __init__(self, ingredients, seed: int = -1):
            super().__init__(ingredients.local_sgd())
            self.chance = random.Random(seed) if seed >= 0 else random.Random()

    class Once(FedAvg):
        made = False

        def __init__(self, ingredients):
            super().__init__(ingredients.local_sgd())
            if Once.made:
                raise ValueError("it is there already")
            Once.made = True

    def drawn(ingredients, seeded: bool = False):
        noise = torch.rand(()) if seeded else torch.from_numpy(np.random.default_rng().random(1))[0]
        return LocalTerm("drawn", lambda model, at: at.facts.lr * noise, previous=False)

    def late(ingredients, gives: str = "", previous: bool = True, importance: bool = False):
        key = "terms.late" if importance else "terms.previous"

        def term(model, at):
            if key not in at.shared:
                return at.facts.lr.new_zeros(())
            assert at.shared[key]["fc1.weight"].shape == at.variables["fc1.weight"].shape
            return counts(at.outputs.logits, at.batch, at.facts) if gives == "a count" else None

        norm = Importance(lambda logits, *rest: logits.norm(), torch.square, 5, 1.0)
        return LocalTerm("late", term, previous, norm if importance else None)

    def hits(logits, batch, facts):
        return -((logits.argmax(-1) == batch.y) * batch.weight).mean()

    class Pure:
        kind, buffers = "dense", frozenset()

        def __init__(self, input_shape, classes, draws: bool = False):
            self.draws = draws

        def init(self, seed):
            return {"w": torch.randn(64, 10) if self.draws else torch.zeros(64, 10)}

        def apply(self, variables, x, train):
            logits = x.flatten(1) @ variables["w"]
            return Outputs(logits, logits, {}), {}

    class Odd(Pure):
        kind = "odd"

    class Thawed(Pure):
        frozen = ["w"]

    class Arrays(Pure):
        def init(self, seed):
            return {"w": super().init(seed)["w"].numpy()}

    def a_class(input_shape, classes):
        return Pure

    class Begins(FedAvg):
        def __init__(self, ingredients):
            super().__init__(ingredients.local_sgd())

        def round(self, state, context):
            raise TypeError("no")
            yield

    class Draws(FedAvg):
        def init(self, variables, context):
            return {"variables": variables, "generator": torch.Generator()}

        def variables(self, state):
            return state["variables"]

    class NeverYields(FedAvg):
        def round(self, state, context):
            return state

    class TellsNoModel(FedAvg):
        def variables(self, state):
            state.variables

    class TellsAPart(FedAvg):
        def variables(self, state):
            return {name: leaf for name, leaf in state.variables.items() if name != "fc1.bias"}

    class TellsAnArray(FedAvg):
        def variables(self, state):
            return {**state.variables, "fc1.bias": state.variables["fc1.bias"].numpy()}

    class ReducesAnother(FedAvg):
        def round(self, state, context):
            yield Ask("train", {"model": state.variables}, {"move": weighted_mean.of("dleta")})
            return state

    class GivesAList(FedAvg):
        def round(self, state, context):
            yield Ask("train", {"model": state.variables}, {}, each=[state.variables])

    class LacksMemoryInTraining(Linear):
        def forward(self, x):
            if self.training:
                raise MemoryError
            return super().forward(x)

    class LacksMemoryInAStack(Linear):
        def forward(self, x):
            if self.training and torch._C._functorch.is_functorch_wrapped_tensor(x):
                raise MemoryError
            return super().forward(x)

    class GivesANumber(FedAvg):
        def round(self, state, context):
            yield Ask("train", {"model": state.variables, "mu": {"value": 0.5}}, {})

    class AsksForAnother(FedAvg):
        def __init__(self, ingredients):
            super().__init__(ingredients)
            self.programs = {"other": self.programs["train"]}

    class Misspells(FedAvg):
        def round(self, state, context):
            yield Ask("train", {"modle": state.variables}, {"delta": weighted_mean})
            return state

    class Sends(LocalSGD):
        def finish(self, carry, shared, own, facts):
            outcome = super().finish(carry, shared, own, facts)
            return Outcome({**outcome.payload, "more": {"size": torch.zeros(3)}}, own)

    class Keeps(LocalSGD):
        def finish(self, carry, shared, own, facts):
            outcome = super().finish(carry, shared, own, facts)
            return Outcome(outcome.payload, {"before": outcome.payload["delta"]["fc1.bias"]})

    class KeepsTrees(Keeps):
        def finish(self, carry, shared, own, facts):
            outcome = super().finish(carry, shared, own, facts)
            return Outcome(outcome.payload, {"before": outcome.payload["delta"]})

    @dataclass(frozen=True)
    class Measures(LocalSGD):
        count: int = 64

        def step(self, carry, batch, shared, own, facts, noise):
            carry, metrics = super().step(carry, batch, shared, own, facts, noise)
            return carry, {**metrics, **{f"class {label}": torch.zeros(()) for label in range(self.count)}}

    def measures(ingredients, count: int = 64):
        return FedAvg(ingredients.training(Measures, count=count))

    def sends(ingredients):
        return FedAvg(ingredients.training(Sends))

    def keeps(ingredients):
        return FedAvg(ingredients.training(Keeps))

    def keeps_trees(ingredients):
        return FedAvg(ingredients.training(KeepsTrees))
"""
OF_TASKS = (
    "fedavg-gen",
    "fedprox-plus",
    "fedlwf-2t",
    "fedcil",
    "target",
    "lander",
    "icarl",
    "glfc",
    "fedcbdr",
    "der",
    "oracle",
    "new-classes",
    "generator-replay",
)
REPLAY = "digits-tasks+uniform-replay"
TASKS = ("stream.kind=classes", "stream.tasks=5")
CANNOT = "'fedavg' can't train the model '{model}' by the loss '{loss}': the program failed: "


@pytest.fixture(autouse=True)
def _own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path_factory.getbasetemp() / "trial-cache"))
    (tmp_path / "tried.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(str(tmp_path))


def tried(*settings: str, preset: str = "digits-small") -> None:
    try_out(opened(*settings, preset=preset))


def opened(*settings: str, preset: str = "digits-small") -> Parts:
    return Parts(load_experiment(preset, list(settings), {})[0])


@HERE
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["model={name='tried:Linear',more=-1}"],
            "model 'tried:Linear' gives logits [2, 9] where the data have 10 classes; they must be [2, 10]",
        ),
        (["model={name='tried:Linear',more=1}", "algorithm.loss=wsm"], "logits [2, 11] where the data have 10 classes"),
        (["model.name=tried:Tall"], "gives logits [2, 1, 10] where"),
        (
            ["model={name='tried:Counts',kind='uint8'}"],
            "model 'tried:Counts' changes its buffer 'count' in training, and uint8 has no negative numbers, which a",
        ),
        (
            ["model={name='tried:Counts',kind='complex64'}"],
            "has the variable 'count' of complex64, which cannot travel to devices; use one of float64, float32,",
        ),
        (["model.name=tried:Whole"], "gives logits of torch.int64; they must be floating-point numbers"),
        (["model.name=tried:Writes"], "model 'tried:Writes' writes to its variable 'layer.weight' ("),
        (
            ["model.name=tried:Remembers"],
            "model 'tried:Remembers' gives other logits when it is applied to the same batch again, because it keeps",
        ),
        (
            ["model={name='tried:Warms',kept='a count'}"],
            "model 'tried:Warms' keeps 'counts.batches' from one batch to the next outside of buffers, so devices",
        ),
        (["model={name='tried:Warms',kept='a count'}", *TASKS], "model 'tried:Warms' keeps 'counts.batches' from"),
        (["model={name='tried:Warms',kept='a count',training=false}"], "model 'tried:Warms' keeps 'counts.batches' fr"),
        (["model={name='tried:Warms',kept='a list'}"], "model 'tried:Warms' keeps 'seen' from one batch to the next"),
        (["model={name='tried:Warms',kept='a mean'}"], "model 'tried:Warms' keeps 'mean' from one batch to the next"),
        (
            ["model.name=tried:Raises"],
            "model 'tried:Raises' can't be applied to a batch [2, 1, 8, 8] of the data: ValueError: not today",
        ),
        (
            ["model.name=tried:Raises", "data.dataset=tried:quantities"],
            "model 'tried:Raises' can't be applied to a batch [2, 2] of whole numbers, which stand for tokens (give "
            "fractions if they are quantities, and uint8 if they are pixels): ValueError: not today",
        ),
        (
            ["model.name=tried:RaisesInTraining"],
            CANNOT.format(model="tried:RaisesInTraining", loss="cross_entropy") + "ValueError: not today",
        ),
        (
            ["model.name=tried:Detaches"],
            "model 'tried:Detaches' gives logits that no variable has a gradient of, so training changes nothing; its",
        ),
        (
            ["algorithm.loss=tried:vector"],
            CANNOT.format(model="mlp", loss="tried:vector") + "the loss gave a tensor of the shape [10]; it must give ",
        ),
        (
            ["model.name=tried:Branches", "local.executor=checked"],
            "model 'tried:Branches' branches on values, so local.executor = 'checked' can't compute it; choose 'auto'",
        ),
        (
            ["algorithm.loss=tried:per_row", "local.executor=checked"],
            "'fedavg' can't train the model 'mlp' by the loss 'tried:per_row': the executors disagree on delta/",
        ),
        (
            ["algorithm.loss=tried:counts"],
            "the first training step has another result when it is done again, because the loss 'tried:counts' keeps",
        ),
        (
            ["algorithm.terms={'tried:counting'={}}"],
            "has another result when it is done again, because the local term 'tried:counting' keeps something from",
        ),
        (
            [*TASKS, "algorithm.terms={'tried:late'={}}"],
            "by the loss 'cross_entropy' after the first task: the program failed: the term 'tried:late' gave a NoneT",
        ),
        (
            [*TASKS, "algorithm.terms={'tried:late'={previous=false,importance=true}}"],
            "by the loss 'cross_entropy' after the first task: the program failed: the term 'tried:late' gave a NoneT",
        ),
        (
            [*TASKS, "algorithm.terms={'tried:late'={gives='a count'}}"],
            "has another result when it is done again, because the local term 'tried:late' keeps something from",
        ),
        (
            ["algorithm.loss=tried:hits"],
            "the loss 'tried:hits' gives a value of which the logits have no gradient, so training changes nothing; it",
        ),
        (
            ["model.name=tried:a_class"],
            "model 'tried:a_class' made the class Pure; it must make an object of the class",
        ),
        (["model.name=tried:Odd"], "model 'tried:Odd' is of the kind 'odd'; it must be dense or convolutional or seq"),
        (
            ["model.name=tried:Arrays"],
            "init of the model 'tried:Arrays' returned no tensors by name; it must return all",
        ),
        (
            ["model={name='tried:Pure',draws=true}"],
            "model 'tried:Pure' begins with another 'w' each time; let init draw by a generator with its seed, as by",
        ),
        (["algorithm.name=tried:Begins"], "algorithm 'tried:Begins' fails before its first request: TypeError: no"),
        (
            ["algorithm.name=tried:Unseeded"],
            "algorithm 'tried:Unseeded' has another 'chance' each time that it is made, and each process makes it; giv",
        ),
        (
            ["algorithm.terms={'tried:drawn'={}}"],
            "the local term 'tried:drawn' has another 'noise' each time that it is made, and each process makes it; g",
        ),
        (["algorithm.name=tried:NeverYields"], "the algorithm's round is no generator; it must yield an Ask or"),
        (
            ["algorithm.name=tried:Draws"],
            "state/generator of the algorithm is a Generator, which a checkpoint cannot hold; use tensors, scalars, ",
        ),
        (
            ["algorithm.name=tried:TellsNoModel"],
            "variables(state) is a NoneType; it must be the model, as tensors",
        ),
        (
            ["algorithm.name=tried:TellsAPart"],
            "the algorithm's variables(state) lacks the variable 'fc1.bias'; it must be the whole model, with all",
        ),
        (
            ["algorithm.name=tried:TellsAnArray"],
            "the algorithm's variables(state) has a ndarray as 'fc1.bias', which is a tensor in the model; it must be",
        ),
        (
            ["algorithm.name=tried:ReducesAnother"],
            "the algorithm reduces the key 'dleta' by weighted_mean, but the payload has no tensors under this key; "
            "it has 'delta'",
        ),
        (
            ["algorithm.name=tried:GivesAList"],
            "asks for the program 'train', and 'each' of this Ask must be trees by device, as in {0: {",
        ),
        (
            ["algorithm.name=tried:GivesANumber"],
            "asks for the program 'train', and shared['mu']['value'] of this Ask is a float; it must be a tensor, as",
        ),
        (
            ["algorithm.name=tried:Misspells"],
            "algorithm asks for the program 'train', which reads shared['model'], but 'shared' of this Ask has only "
            "'modle'",
        ),
        (["algorithm.name=tried:AsksForAnother"], "asks for the program 'train', which it does not have"),
        (
            ["algorithm.name=tried:sends"],
            "algorithm 'tried:sends': the program 'train' returns 'more/size' from finish as torch.float32 [3], but "
            "its payload tells nothing of it; let payload return tensors of the same names, shapes and types",
        ),
        (
            ["algorithm.name=tried:keeps"],
            "returns 'before' from finish as torch.float32 [64], but its initial_own tells nothing of it; let",
        ),
        (
            ["local.steps=2147483647", "local.batch_size=1000"],
            "local.steps = 2147483647 is too much: the list of a device's batches alone would take 17.2 TB, and ",
        ),
        (
            ["local.epochs=2147483647", "fleet.devices=5"],
            "local.epochs = 2147483647 is too much: the list of a device's batches alone would take 4.9 TB, and ",
        ),
        (
            ["limits.max_payload_bytes=19239"],
            "a reply to 'train' has 19240 bytes, more than limits.max_payload_bytes = 19239; raise the limit",
        ),
        (
            ["algorithm.name=tried:measures"],
            "the program 'train' tells 65 measures, and a reply holds 64; tell fewer",
        ),
        (["algorithm.name=tried:keeps_trees"], "returns 'before' from finish as no tensor (dict), but its initial_own"),
        (
            ["algorithm.terms={'tried:important'={value='raises'}}"],
            "the importances of the local term 'mine' can't be computed: the question could not be answered: ",
        ),
        (
            ["algorithm.terms={'tried:important'={value='vector'}}"],
            "the value of a sample is a tensor of the shape [1, 10]; it must be a tensor without dimensions",
        ),
        (
            ["algorithm.terms={'tried:important'={strength='sum'}}"],
            "the strength of gradients [2, 64, 64] is []; it must be a tensor of the same shape",
        ),
    ],
)
def test_an_experiment_that_cannot_be_computed_is_refused_in_one_sentence(settings: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)) as caught:
        tried(*settings)
    sentence, *frames = str(caught.value).splitlines()
    assert len(sentence) < 700
    assert all(re.match(r"    .*tried\.py:\d+ in \w+: ", frame) for frame in frames)


def test_a_training_step_that_ends_its_process_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="the first training step ends its process: SystemExit: 3, "):
        tried("model.name=tried:Exits")


@HERE
def test_a_measure_of_replay_counts_among_those_that_a_reply_holds() -> None:
    tried("algorithm.name=tried:measures", "algorithm.options.count=63")
    tried("algorithm.name=tried:measures", "algorithm.options.count=62", preset=REPLAY)
    said = "the program 'train' tells 65 measures, one of them of replay, and a reply holds 64; tell fewer"
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        tried("algorithm.name=tried:measures", "algorithm.options.count=63", preset=REPLAY)


@HERE
def test_what_is_drawn_by_a_seed_is_not_another_one_each_time() -> None:
    tried("algorithm={name='tried:Unseeded',options={seed=3},terms={'tried:drawn'={seeded=true}}}")


@HERE
def test_a_method_need_not_be_made_twice_in_a_process() -> None:
    tried("algorithm.name=tried:Once")


@HERE
def test_what_a_term_never_finds_is_not_tried() -> None:
    tried("algorithm.terms={'tried:late'={}}")  # there is one task
    tried(*TASKS, "algorithm.terms={'tried:late'={previous=false}}")


@HERE
def test_a_model_may_keep_a_cache_and_what_it_computes_anew_for_each_batch() -> None:
    tried("model={name='tried:Warms',kept='a cache'}")


@HERE
def test_a_model_may_count_in_a_buffer_of_signed_numbers() -> None:
    tried("model={name='tried:Counts',kind='int32'}")


@HERE
def test_a_model_may_write_to_the_batch_that_it_is_given() -> None:
    tried("model.name=tried:Halves")


@HERE
def test_a_model_without_gradients_goes_with_a_method_that_does_not_train() -> None:
    tried("model.name=tried:Detaches", preset="digits-small+ncm-random")


def test_an_error_in_somebodys_own_code_is_told_with_its_file_and_its_lines(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tried("model.name=tried:RaisesInTraining")
    file, [number] = (
        tmp_path / "tried.py",
        [number for number, line in enumerate(textwrap.dedent(OWN).splitlines(), 1) if "Tomorrow" in line],
    )
    sentence, *frames = str(caught.value).splitlines()
    assert sentence.endswith(f"ValueError: not today. Tomorrow perhaps, {file}:{number}")
    assert frames == [f'    {file}:{number} in forward: raise ValueError("not today. Tomorrow perhaps.")']
    assert isinstance(caught.value.__cause__, ValueError)
    assert "vmapped.py" in str(caught.value.__cause__.__cause__)


@HERE
def test_a_table_that_has_no_row_for_a_token_of_any_sample_is_refused() -> None:
    fleet = "data.dataset=tried:tokens", "fleet.devices=4", "fleet.per_round=2"
    with pytest.raises(ConfigurationError, match=r"all samples, with values from 0 to 40: IndexError: .*tried\.py:\d+"):
        tried("model={name='tried:Table',rows=40}", *fleet)
    tried("model={name='tried:Table',rows=41}", *fleet)


@HERE
def test_data_of_one_class_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"all labels of the data set 'tried:one_class' are '0'; there is"):
        tried("data.dataset=tried:one_class", "fleet.devices=4", "fleet.per_round=2")


@HERE
def test_a_model_that_only_one_executor_can_compute_is_tried_with_that_executor() -> None:
    tried("model.name=tried:Branches", "local.executor=serial")


def test_a_trial_changes_nothing_in_this_process() -> None:
    taken = opened("model={name='tried:Writes',more=1}")
    variables, drawn, threads = map_leaves(torch.clone, taken.variables), torch.get_rng_state(), torch.get_num_threads()
    with pytest.raises(ConfigurationError):
        try_out(taken)
    assert all(torch.equal(leaf, variables[name]) for name, leaf in taken.variables.items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("name", ["Dies", "LacksMemory", "LacksMemoryInTraining"])
def test_a_failure_of_this_machine_is_no_refusal_where_the_executor_is_known(name: str) -> None:
    parts = opened(f"model.name=tried:{name}", "local.executor=vmapped")
    assert try_out(parts) == Computing("vmapped")
    parts = opened(f"model.name=tried:{name}")
    assert try_out(parts, began="plain") == Computing("plain")


@pytest.mark.parametrize(
    ("name", "executor", "how"),
    [
        ("Dies", "auto", "was ended by SIGKILL (the kernel does so if memory runs out)"),
        ("Dies", "serial", "was ended by SIGKILL (the kernel does so if memory runs out)"),
        ("LacksMemory", "auto", r"lacked memory \(.*MemoryError, .*tried\.py:\d+\)"),
        ("LacksMemoryInTraining", "auto", r"lacked memory \(.*MemoryError, .*tried\.py:\d+\)"),
        ("LacksMemoryInAStack", "auto", r"lacked memory \(.*MemoryError, .*tried\.py:\d+\)"),
    ],
)
def test_a_trial_without_an_end_does_not_choose_how_own_code_is_computed(name: str, executor: str, how: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        tried(f"model.name=tried:{name}", f"local.executor={executor}")
    said = (
        "the process that tried the first training step, to find how your own code can be computed, "
        f"{how if how.startswith('lacked') else re.escape(how)}; free memory and try again, or set local.executor = "
        "'plain', which computes any code"
    )
    assert re.fullmatch(said, str(caught.value)), caught.value


@HERE
def test_a_run_keeps_the_executor_with_which_it_began() -> None:
    parts = opened("model.name=tried:Branches")
    found = try_out(parts)
    assert found.executor == "serial"
    assert try_out(parts, began="serial") == found
    assert try_out(parts, began="plain") == Computing("plain")


def test_a_machine_that_starts_no_process_to_try_in_says_so_and_keeps_nothing_open(
    monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], set[str]]
) -> None:
    monkeypatch.setattr(os, "fork", MagicMock(side_effect=BlockingIOError(errno.EAGAIN, "")))
    parts = opened()
    _ = parts.corpus  # whose files stay open
    before = descriptors()
    with pytest.raises(ConfigurationError, match="no process can be started on this machine: the limit of processes"):
        try_out(parts)
    assert not descriptors() - before


@HERE
@pytest.mark.parametrize("method", [name for name, _ in methods()])
def test_every_method_passes_the_trial(method: str) -> None:
    """Each method is tried on a setting that has what it needs. Replay gets what the method does not set."""
    setting, more = "digits-small", []
    if method.startswith("mfcl") or method in OF_TASKS:
        setting, more = "digits-tasks", ["replay.capacity=20"]
    elif method.endswith("-replay"):
        setting = "digits-drift"
    if method == "der":
        more.append("replay.strategy=naive_uniform")
    tried(*more, preset=f"{setting}+{method}" if method == "public" else f"{setting}+public+{method}")


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Settings whose data are lines of text instead of the digits."""
    monkeypatch.setenv("FEDEMU_DATA", str(tmp_path))
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    (tmp_path / "lines.txt").write_text("\n".join(f"line {i}" for i in range(100)))
    return "data.dataset=lines.txt", "data.text={kind='next',length=10,tokenizer='characters'}"


@HERE
def test_a_language_model_gives_logits_for_every_token(texts: tuple[str, ...]) -> None:
    loss = "algorithm.loss=token_cross_entropy"
    tried(*texts, loss, "model.name=gru")
    with pytest.raises(ConfigurationError) as caught:
        tried(*texts, loss, "model.name=tried:PerText")
    assert str(caught.value) == (
        "model 'tried:PerText' gives logits [2, 20] where the data have 20 tokens; they must be [2, 10, 20]"
    )


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["model.name=gru"], "set algorithm.loss = 'token_cross_entropy'"),
        (["model.name=cnn", "algorithm.loss=token_cross_entropy"], "model 'cnn' tells labels, but the data are texts"),
        (["model.name=mlp", "algorithm.loss=token_cross_entropy"], "model 'mlp' tells labels, but the data are texts"),
        (
            ["model.name=gru", "algorithm.loss=token_cross_entropy", "local.augment=['mask']"],
            "mask goes with masked language modelling",
        ),
    ],
)
def test_a_wrong_setting_for_texts_is_refused_in_one_sentence(
    settings: list[str], said: str, texts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(said)):
        tried(*texts, *settings)
