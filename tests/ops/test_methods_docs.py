"""``docs/methods.md`` against the code: options and their defaults, what is sent and kept, what goes together."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedemu.algorithms import metrics
from fedemu.algorithms.ingredients import Ingredients
from fedemu.algorithms.interface import Ask, Context, Tree
from fedemu.algorithms.models import mlp
from fedemu.algorithms.registry import ALGORITHMS, CRITERIA, build_algorithm, find_criterion
from fedemu.algorithms.replay import LOOKS_AT_MODEL, NEEDS_LABELS, ReplaySettings, with_replay
from fedemu.algorithms.selection import STRATEGIES
from fedemu.ops.presets import is_preset
from fedemu.protocol.errors import ConfigurationError

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
OPTION = re.compile(r"^\| `(\w+)` \| `([^`]+)` \|", re.MULTILINE)
GLANCE = re.compile(r"^\| `(\w+)` \| (\d) \| (\d) \| (\d) \| (\w+) \| ([^|]+) \| (\w+) \| (\w+) \|$", re.MULTILINE)
AT_A_GLANCE = {name: rest for name, *rest in GLANCE.findall(PAGE)}

MODEL = mlp((8,), 4, (16,))
EPOCHS = 5


def ingredients(loss: str = "cross_entropy", public: bool = True) -> Ingredients:
    return Ingredients(MODEL, find_criterion(loss), 4, EPOCHS, 10, 0.1, devices=9, public=public, input_shape=(8,))


def built(name: str, *, loss: str = "cross_entropy", public: bool = True) -> Any:
    return build_algorithm(name, {}, ingredients(loss, public))


def fits(build: Callable[[], Any]) -> str:
    try:
        build()
    except ConfigurationError:
        return "no"
    return "yes"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_option_of_a_method_is_told_with_its_default_and_no_other(name: str) -> None:
    _, *options = inspect.signature(ALGORITHMS[name]).parameters.values()
    told = {option: tomllib.loads(f"it = {default}")["it"] for option, default in OPTION.findall(SECTIONS[name])}
    assert told == {option.name: option.default for option in options}


def test_every_loss_has_its_section() -> None:
    assert CRITERIA.keys() <= SECTIONS.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_method_sends_keeps_tells_and_costs(name: str) -> None:
    algorithm, variables, context = built(name), MODEL.init(0), Context(round=1, task=0, seed=0, classes=4)
    ask = next(algorithm.round(algorithm.init(variables, context), context))
    assert isinstance(ask, Ask)
    program = algorithm.programs[ask.program]
    down, up, kept, counts, passes, public, _ = AT_A_GLANCE[name]
    assert int(down) == models(ask.shared)
    assert int(up) == models(program.payload(ask.shared))
    assert int(kept) == models({"own": program.initial_own(ask.shared)})
    assert counts == ("yes" if program.declares_label_counts else "no")
    assert program.passes == evaluated(passes)
    assert public != fits(lambda: built(name, public=False))


def models(forest: Mapping[str, Tree]) -> int:
    """How many models such trees come to, up to a few numbers."""
    numbers = sum(leaf.numel() for tree in forest.values() for leaf in tree.values())
    return round(numbers / sum(leaf.numel() for leaf in MODEL.init(0).values()))


def evaluated(passes: str) -> int:
    """A sum like ``3 E + 20``."""
    terms = passes.split(" + ")
    return sum(EPOCHS * int(term[:-1] or 1) if term.endswith("E") else int(term) for term in terms)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_which_methods_take_the_reweighted_softmax(name: str) -> None:
    assert AT_A_GLANCE[name][-1] == fits(lambda: built(name, loss="wsm"))


def test_the_table_of_methods_holds_them_all() -> None:
    assert AT_A_GLANCE.keys() == ALGORITHMS.keys()


def test_what_strategies_of_replay_are_sent_need_and_cost() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| (nothing|the model|below) \| (\d|below) \| (yes|no) \|", PAGE, flags=re.MULTILINE
    )
    assert {name for name, *_ in rows} == {*STRATEGIES, "coordinated"} - {"none"}
    for name, sent, passes, labels in rows:
        assert labels == ("yes" if name in NEEDS_LABELS else "no")
        assert (sent == "nothing") == (name not in LOOKS_AT_MODEL)
        replayed = with_replay(built("fedavg"), ReplaySettings(name), ingredients())
        if name != "coordinated":
            assert replayed.programs["select"].passes == float(passes)
    assert (replayed.programs["gradient_sum"].passes, replayed.programs["select"].passes) == (3, 2)


def test_every_measure_of_forgetting_is_a_function() -> None:
    measures = re.findall(r"^\| `(\w+)`[^|]* \|[^|]+\|[^|]+(?:eq\.|section)[^|]+\|", PAGE, flags=re.MULTILINE)
    assert len(measures) == 9
    assert [name for name in measures if not callable(getattr(metrics, name, None))] == []


def test_presets_that_the_page_runs_are_there() -> None:
    named = re.findall(r"fedemu run (\S+)", PAGE)
    assert len(named) > 5
    assert [name for name in named if not is_preset(name.replace("$method", "fedntd"))] == []
    parts = re.findall(r"`\+([a-z-]+)`", PAGE)
    assert len(parts) > 5
    assert [part for part in parts if not is_preset(f"digits+{part}")] == []
