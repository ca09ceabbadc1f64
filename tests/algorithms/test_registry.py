"""Models, losses and methods by name, and the sentences about names that lead nowhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from fedemu.algorithms import names
from fedemu.algorithms.interface import Context
from fedemu.algorithms.methods.fedavg import FedAvg
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.registry import (
    ALGORITHMS,
    CRITERIA,
    build_algorithm,
    build_model,
    build_terms,
    find_criterion,
)
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.training.objective import cross_entropy
from fedemu.protocol.errors import ConfigurationError

OWN = '''
import numpy as np
import torch
from torch import nn
from fedemu.algorithms.methods.fedavg import FedAvg
from fedemu.algorithms.terms.consolidation import ewc
from fedemu.algorithms.terms.local_term import LocalTerm
from fedemu.algorithms.training.objective import proximity


class FedProx(FedAvg):
    """Keeps local models near the global one."""

    def __init__(self, ingredients, mu: float = 1.0):
        super().__init__(ingredients.local_sgd(proximity(mu)))
        self.mu = mu


def network(input_shape, classes, width: int = 4):
    return nn.Sequential(nn.Flatten(), nn.Linear(input_shape[0], width), nn.ReLU(), nn.Linear(width, classes))


def explained(input_shape, classes, width: "the number of units" = 4, unit: "np.no_such_type" = None):
    return network(input_shape, classes, width)


class OfItsOwnSizes(nn.Linear):
    def __init__(self, bias: bool = True):
        super().__init__(4, 3, bias)


class OfDefaults(nn.Linear):
    def __init__(self, input_shape=(2,), classes=2, bias: bool = True):
        super().__init__(input_shape[0], classes, bias)


class OfKeywords(nn.Linear):
    def __init__(self, *, classes, input_shape=(2,)):
        super().__init__(input_shape[0], classes)


def nothing(ingredients):
    return 3


def refuses(ingredients):
    raise ValueError("mu and nu exclude each other")


class DrawsOnItsOwn(nn.Linear):
    def __init__(self, frozen=False, seed=None):
        super().__init__(4, 3)
        self.register_buffer("nothing", torch.full((2,), torch.nan))
        self.weight.data.copy_(torch.from_numpy(np.random.default_rng(seed).random((3, 4))))
        self.weight.requires_grad_(not frozen)


class Listed(FedAvg):
    def __init__(self, ingredients):
        super().__init__(ingredients)
        self.programs = [*self.programs.values()]


def exits(ingredients):
    raise SystemExit(3)


def another_ewc(ingredients):
    return ewc(ingredients, coefficient=1.0)


def double(logits, batch, facts):
    return 2 * logits.sum()


def of_labels(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels)


def of_the_pass(ingredients):
    return LocalTerm("of_the_pass", lambda at: 0 * at.outputs.logits.sum(), previous=False)


broken = 5
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the working folder, which is not on the import path."""
    (tmp_path / "registry_example.py").write_text(OWN)
    (tmp_path / "registry_fails.py").write_text("import no_such_package\n")
    monkeypatch.chdir(tmp_path)
    return "registry_example"


@pytest.fixture
def ingredients() -> Ingredients:
    return Ingredients(mlp((4,), 3, (2,)), cross_entropy, classes=3, epochs=1, batch_size=2, lr=0.1)


def test_built_in_models_take_their_options() -> None:
    model = build_model("mlp", {"hidden": [7, 5]}, (4,), 3)
    assert {name: tuple(leaf.shape) for name, leaf in model.init(0).items() if "weight" in name} == {
        "fc1.weight": (7, 4),
        "fc2.weight": (5, 7),
        "fc3.weight": (3, 5),
    }


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        (
            "mpl",
            {},
            "model 'mpl' is none of mlp, cnn, lenet, resnet18, random_features, gru, tinybert, tinybert_small; "
            "did you mean 'mlp'?",
        ),
        ("transformer", {}, "your own are named module:Name"),
        ("mlp", {"hiden": [3]}, "'mlp' has no option model.hiden; did you mean 'hidden'?"),
        ("mlp", {"hidden": ["wide"]}, "model.hidden[0] = 'wide' does not fit 'mlp'"),
        ("mlp", {"hidden": 64}, "model.hidden = 64 does not fit 'mlp'"),
        ("mlp", {"hidden": [64, True]}, "model.hidden[1] = True does not fit 'mlp': it must be a number"),
        ("mlp", {"hidden": [64, "64"]}, "model.hidden[1] = '64' does not fit 'mlp': it must be a number"),
        ("mlp", {"projection": "8"}, "model.projection = '8' does not fit 'mlp': it must be a number"),
        ("mlp", {"hidden": [0]}, "model.hidden[0] = 0 does not fit 'mlp'"),
        (
            "mlp",
            {"hidden": [64, 10**12]},
            "model.hidden = [64, 1000000000000] does not fit 'mlp': whole numbers must be at most 4294967295",
        ),
        ("cnn", {"hidden": [3]}, "'cnn' has no option model.hidden; it has projection"),
        ("resnet18", {"norm": "layer"}, "model.norm = 'layer' does not fit 'resnet18'"),
    ],
)
def test_a_wrong_model_or_option_is_named(name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_model(name, options, (1, 8, 8), 10)
    assert sentence in str(caught.value)


def test_annotations_of_an_own_model_may_be_any_text(own: str) -> None:
    model = build_model(f"{own}:explained", {"width": 5}, (4,), 3)
    assert model.init(0)["1.weight"].shape == (5, 4)


def test_an_own_method_is_built_with_its_options(own: str, ingredients: Ingredients) -> None:
    method = build_algorithm(f"{own}:FedProx", {"mu": 0.5}, ingredients)
    assert isinstance(method, FedAvg)
    assert method.mu == 0.5  # type: ignore[attr-defined]
    context = Context(1, 0, 1, 3)
    ask = next(method.round(method.init(ingredients.model.init(0), context), context))
    assert set(ask.shared) == {"model"}  # type: ignore[union-attr]


def test_an_own_torch_module_becomes_a_model(own: str) -> None:
    model = build_model(f"{own}:network", {"width": 6}, (4,), 3)
    outputs, _ = model.apply(model.init(0), torch.zeros(2, 4), True)
    assert outputs.logits.shape == (2, 3)
    assert model.init(0)["1.weight"].shape == (6, 4)


def test_a_module_that_needs_no_arguments_is_built_without_any(own: str) -> None:
    assert build_model(f"{own}:OfItsOwnSizes", {}, (4,), 3).init(0).keys() == {"weight", "bias"}
    assert build_model(f"{own}:OfItsOwnSizes", {"bias": False}, (4,), 3).init(0).keys() == {"weight"}


def test_defaults_do_not_stand_for_the_shape_of_a_sample_and_the_number_of_classes(own: str) -> None:
    for options, leaves in (({}, {"weight", "bias"}), ({"bias": False}, {"weight"})):
        variables = build_model(f"{own}:OfDefaults", options, (4,), 3).init(0)
        assert (variables.keys(), variables["weight"].shape) == (leaves, (3, 4))
    options = {"input_shape": [4], "classes": 3}
    assert build_model(f"{own}:OfKeywords", options, (9,), 9).init(0)["weight"].shape == (3, 4)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_module_that_is_another_one_each_time_it_is_built_is_refused(own: str, frozen: bool) -> None:
    with pytest.raises(
        ConfigurationError, match="DrawsOnItsOwn' begins with another 'weight' each time it is built; let"
    ):
        build_model(f"{own}:DrawsOnItsOwn", {"frozen": frozen}, (4,), 3)
    build_model(f"{own}:DrawsOnItsOwn", {"frozen": frozen, "seed": 3}, (4,), 3)


def test_an_own_criterion_and_a_file_by_its_path(own: str, tmp_path: Path) -> None:
    assert find_criterion("cross_entropy") is cross_entropy
    criterion = find_criterion(f"{tmp_path / 'registry_example.py'}:double")
    assert float(criterion(torch.ones(2, 3), None, None)) == 12.0  # type: ignore[arg-type]


def test_a_loss_or_term_of_other_arguments_is_told_with_which_it_is_called(own: str, ingredients: Ingredients) -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_criterion(f"{own}:of_labels")
    assert str(caught.value) == (
        "algorithm.loss 'registry_example:of_labels' is called with (logits, batch, facts), and can't be: "
        "too many positional arguments"
    )
    with pytest.raises(ConfigurationError) as caught:
        build_terms({f"{own}:of_the_pass": {}}, ingredients)
    assert str(caught.value) == (
        "the function of algorithm.terms 'registry_example:of_the_pass' is called with (the model, the pass), "
        "and can't be: too many positional arguments"
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("registry_example:Nowhere", "registry_example has no 'Nowhere'"),
        ("registry_nowhere:FedProx", "'registry_nowhere' can't be imported: ModuleNotFoundError"),
        ("registry_fails:FedProx", "'registry_fails' can't be imported: ModuleNotFoundError: No module named"),
        ("nowhere.py:FedProx", "there is no Python file nowhere.py"),
        ("registry_example:broken", "is int; it must be a function or a class"),
        ("registry_example:nothing", "made an int, which lacks programs, init, round, variables"),
        ("registry_example:network", "it is called with (ingredients) and the options of [algorithm.options]"),
        ("registry_example:refuses", "can't be built: ValueError: mu and nu exclude each other"),
        ("registry_example:Listed", "'registry_example:Listed' has its programs in a list; they must have names"),
        ("registry_example:exits", "can't be built: SystemExit: 3"),
        ("fedavgg", "did you mean 'fedavg'?"),
    ],
)
def test_an_own_method_that_cannot_be_used_is_named(
    own: str, ingredients: Ingredients, name: str, sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_algorithm(name, {}, ingredients)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("fedavg", {"mu": 1.0}, "'fedavg' has no option algorithm.options.mu; it has no options"),
        ("fedntd", {"tau": 0.0}, "algorithm.options.tau = 0.0 does not fit 'fedntd'"),
        ("fedntd", {"beta": -1.0}, "algorithm.options.beta = -1.0 does not fit 'fedntd'"),
        ("moon", {"temperature": 0.0}, "algorithm.options.temperature = 0.0 does not fit 'moon'"),
        ("moon", {"mu": -0.1}, "algorithm.options.mu = -0.1 does not fit 'moon'"),
        (
            "feddf",
            {"evaluate_every": 10**12},
            "algorithm.options.evaluate_every = 1000000000000 does not fit 'feddf': whole numbers must be at most",
        ),
        ("moon", {"mu": True}, "algorithm.options.mu = True does not fit 'moon': it must be a number"),
        (
            "fednova",
            {"subtract_previous": 1},
            "algorithm.options.subtract_previous = 1 does not fit 'fednova': it must be true",
        ),
        ("moon", {"mu": math.inf}, "algorithm.options.mu = inf does not fit 'moon': it must be finite"),
        ("moon", {"mu": 3.41e38}, "algorithm.options.mu = 3.41e+38 does not fit 'moon': it must be 0, or from 1.2e-38"),
        ("moon", {"temperature": 1e-39}, "algorithm.options.temperature = 1e-39 does not fit 'moon': it must be 0, or"),
    ],
)
def test_a_wrong_option_of_a_built_in_method_is_named(
    ingredients: Ingredients, name: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        build_algorithm(name, options, ingredients)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("beta", [0.0, 1.2e-38, 3.4e38])
def test_an_option_that_float32_holds_is_taken(beta: float, ingredients: Ingredients) -> None:
    assert build_algorithm("fedntd", {"beta": beta}, ingredients)


def test_an_unknown_option_of_a_method_is_named(own: str, ingredients: Ingredients) -> None:
    with pytest.raises(ConfigurationError, match=r"has no option algorithm.options.mus; did you mean 'mu'\?"):
        build_algorithm(f"{own}:FedProx", {"mus": 0.5}, ingredients)


def test_the_list_of_names_has_every_method_and_loss_once() -> None:
    assert sorted(names.METHODS) == sorted(ALGORITHMS)
    assert sorted(names.LOSSES) == sorted(CRITERIA)


def test_two_terms_that_would_remember_under_one_name_are_refused(own: str, ingredients: Ingredients) -> None:
    assert list(build_terms({"ewc": {}, "mas": {}}, ingredients)) == ["ewc", "mas"]
    with pytest.raises(
        ConfigurationError, match="'ewc' and 'registry_example:another_ewc' both make a LocalTerm 'ewc'"
    ):
        build_terms({"ewc": {}, f"{own}:another_ewc": {}}, ingredients)
