"""``fedemu.algorithms``: the names for people who write methods, losses and models."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedemu.algorithms
from fedemu.algorithms.interface import Ask
from fedemu.algorithms.methods.fedavg import FedAvg

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own_methods.md"


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout.strip()


def names_for_type_checkers() -> list[tuple[str, str]]:
    """(name, module) of every import that a type checker sees."""
    tree = ast.parse(inspect.getsource(fedemu.algorithms))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    return [
        (alias.asname or "", node.module or "")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


def test_a_name_is_the_object_of_the_room_that_defines_it() -> None:
    assert fedemu.algorithms.FedAvg is FedAvg
    assert fedemu.algorithms.Ask is Ask


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'fedemu\.algorithms' has no attribute 'FedAverage'"):
        _ = fedemu.algorithms.FedAverage


def test_the_list_is_sorted_and_names_nothing_twice() -> None:
    assert fedemu.algorithms.__all__ == sorted({*fedemu.algorithms.__all__})
    assert dir(fedemu.algorithms) == fedemu.algorithms.__all__


def test_type_checkers_and_editors_see_the_same_names_from_the_same_modules() -> None:
    told = names_for_type_checkers()
    assert sorted(name for name, _ in told) == fedemu.algorithms.__all__
    homes = {name: getattr(__import__(module, fromlist=[name]), name) for name, module in told}
    assert [name for name, home in homes.items() if getattr(fedemu.algorithms, name) is not home] == []


def test_no_name_is_that_of_a_module_beside_it() -> None:
    """As soon as somebody imported the module, Python would replace the name by it."""
    modules = {path.stem for folder in fedemu.algorithms.__path__ for path in Path(folder).iterdir()}
    assert modules & {*fedemu.algorithms.__all__} == set()


def test_the_import_of_the_package_brings_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "pydantic", "scipy", "fedemu.algorithms.interface")
    code = f"import sys, fedemu.algorithms; print(*(name for name in {heavy!r} if name in sys.modules))"
    assert python(code) == ""


def test_the_names_of_the_contract_come_without_torch() -> None:
    code = "import sys; from fedemu.algorithms import Ask, Reply, Tree, weighted_mean; print('torch' in sys.modules)"
    assert python(code) == "False"


def test_the_page_for_authors_lists_every_name() -> None:
    told = {*re.findall(r"`(\w+)`", PAGE.read_text().split("## All names")[1])}
    assert {*fedemu.algorithms.__all__} - told == set()


def test_the_page_for_authors_imports_from_no_other_place() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    modules = {node.module for code in blocks for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)}
    assert {module for module in modules if module and module.startswith("fedemu")} == {"fedemu.algorithms"}
    assert re.findall(r"fedemu\.algorithms\.\w+", PAGE.read_text()) == []


def test_fedemu_itself_imports_from_the_rooms_and_not_from_the_surface() -> None:
    public = "|".join(fedemu.algorithms.__all__)
    form = re.compile(rf"^\s*from fedemu\.algorithms import .*\b({public})\b", re.MULTILINE)
    floors = ("protocol", "algorithms", "device", "coordinator", "ops")
    files = [path for floor in floors for path in (ROOT / floor).rglob("*.py")]
    wrong = [str(path.relative_to(ROOT)) for path in files if form.search(path.read_text())]
    assert wrong == []


def test_a_method_may_play_the_round_of_a_built_in_one(little_fleet: Callable[..., Any]) -> None:
    """The methods are composed as in ``docs/own_methods.md``. The state counts the rounds of an inner SCAFFOLD."""
    from fedemu.algorithms import Context, Ingredients, Script, Tree, build_algorithm, build_model, cross_entropy

    @dataclass(frozen=True)
    class Counting:
        inner: Any
        rounds: int

    class Wrapper:
        def __init__(self, ingredients: Ingredients) -> None:
            self._inner = build_algorithm("scaffold", {}, ingredients)
            self.programs = self._inner.programs

        def init(self, variables: Tree, context: Context) -> Counting:
            return Counting(self._inner.init(variables, context), 0)

        def round(self, state: Counting, context: Context) -> Script[Counting]:
            inner = yield from self._inner.round(state.inner, context)
            return Counting(inner, state.rounds + 1)

        def variables(self, state: Counting) -> Tree:
            return self._inner.variables(state.inner)

    model = build_model("mlp", {"hidden": [8]}, (1, 12, 12), 4)
    ingredients = Ingredients(model, cross_entropy, classes=4, epochs=1, batch_size=20, lr=0.1, devices=2)
    shares = [np.arange(0, 100), np.arange(100, 200)]
    wrapped = little_fleet(Wrapper(ingredients), model.init(0), shares)
    plain = little_fleet(build_algorithm("scaffold", {}, ingredients), model.init(0), shares)
    for fleet in (wrapped, plain):
        fleet.play([0, 1])
        fleet.play([1])
    assert wrapped.state.rounds == 2
    assert all(torch.equal(leaf, plain.model[name]) for name, leaf in wrapped.model.items())
