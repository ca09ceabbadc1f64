"""The pages of ``docs/methods/`` against the code: options, defaults, what is sent and kept, what goes together."""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedemu.algorithms.interface import Ask, Context, Labelled, PublicData, Reply, ServerJob, Tree
from fedemu.algorithms.measures import forgetting
from fedemu.algorithms.models.feed_forward import mlp
from fedemu.algorithms.models.growing import growing
from fedemu.algorithms.models.image_generator import generator_for, samples_of_equal_memory
from fedemu.algorithms.registry import ALGORITHMS, CRITERIA, TERMS, build_algorithm, find_criterion
from fedemu.algorithms.replay.replay import LOOKS_AT_MODEL, NEEDS_LABELS, with_replay
from fedemu.algorithms.replay.selection.selection import STRATEGIES
from fedemu.algorithms.replay.settings import ReplaySettings
from fedemu.algorithms.streams.tasks import ClassTasks
from fedemu.algorithms.training.ingredients import Ingredients
from fedemu.algorithms.trees import zeros_like
from fedemu.ops.experiment.presets import is_preset
from fedemu.protocol.errors import ConfigurationError

FOLDER = Path(__file__).parents[2] / "docs" / "methods"
PAGE = "\n".join(path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md")))
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^##? |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
OPTION = re.compile(r"^\| `(\w+)` \| `([^`]+)` \|", re.MULTILINE)
AMOUNT = r"(\d|G|D|\d \+ G|\d \+ L)"
GLANCE = re.compile(
    rf"^\| `(\w+)` \| {AMOUNT} \| {AMOUNT} \| (\d) \| (\w+) \| ([^|]+) \| (\w+) \| (\w+) \|$", re.MULTILINE
)
AT_A_GLANCE = {name: rest for name, *rest in GLANCE.findall(PAGE)}
LATER = re.compile(rf"^\| `(\w+)` \| {AMOUNT} \| ([^|]+) \| (none|`\w+`, [^|]+) \| [^|]+ \|$", re.MULTILINE)
IN_LATER_TASKS = {name: rest for name, *rest in LATER.findall(PAGE)}

SHAPE = (1, 8, 8)
MODEL = mlp(SHAPE, 4, (16,))
GROWING = growing(MODEL, ClassTasks.of(4, 2, range(4)), SHAPE)
EPOCHS, BATCH, SYNTHETIC = 5, 10, 32
NOTHING = PublicData(*[Labelled(torch.zeros(0, *SHAPE), torch.zeros(0, dtype=torch.int64))] * 2)
BEGINNING, LATER_ROUND = (Context(task + 1, task, seed=0, classes=4, public=NOTHING) for task in (0, 1))


def ingredients(loss: str = "cross_entropy", public: bool = True, in_tasks: bool = False) -> Ingredients:
    model = GROWING if in_tasks else MODEL
    criterion = find_criterion(loss, model)
    return Ingredients(model, criterion, 4, EPOCHS, BATCH, 0.1, devices=9, public=public, input_shape=SHAPE)


def built(name: str, *, loss: str = "cross_entropy", public: bool = True) -> Any:
    return build_algorithm(name, {}, ingredients(loss, public, name in IN_LATER_TASKS))


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


@pytest.mark.parametrize("name", TERMS)
def test_every_option_of_a_local_term_is_told_with_its_default_and_no_other(name: str) -> None:
    _, *options = inspect.signature(TERMS[name]).parameters.values()
    told = {option: tomllib.loads(f"it = {default}")["it"] for option, default in OPTION.findall(SECTIONS[name])}
    assert told == {option.name: option.default for option in options}


def test_every_loss_has_its_section() -> None:
    assert CRITERIA.keys() <= SECTIONS.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_table_tells_what_a_method_sends_keeps_and_costs(name: str) -> None:
    algorithm = built(name)
    ask = next(algorithm.round(began(algorithm), BEGINNING))
    down, up, kept, counts, passes, public, _ = AT_A_GLANCE[name]
    if not algorithm.programs:
        assert isinstance(ask, ServerJob)
        assert (down, up, kept, counts, passes) == ("0", "0", "0", "no", "0")
        return
    assert isinstance(ask, Ask)
    program = algorithm.programs[ask.program]
    assert down == amount(ask.shared)
    assert up == amount(program.payload(ask.shared))
    assert kept == amount({"own": program.initial_own(ask.shared)})
    assert counts == ("yes" if program.declares_label_counts else "no")
    assert program.passes == evaluated(passes)
    assert public != fits(lambda: built(name, public=False))


def began(algorithm: Any) -> Any:
    """A method's state before its first round."""
    return algorithm.init((GROWING if algorithm.programs.keys() >= {"rehearse"} else MODEL).init(0), BEGINNING)


def amount(forest: Mapping[str, Tree]) -> str:
    """How many models and generators (G) such trees come to, up to a few numbers.

    It is D if there are synthetic samples. L is a layer from features to anchors.
    """
    if "synthetic" in forest:
        return "D"
    model, generator = (sum(leaf.numel() for leaf in it.init(0).values()) for it in (MODEL, generator_for(SHAPE).model))
    leaves = [(key, name, leaf.numel()) for key, tree in forest.items() for name, leaf in tree.items()]
    made = sum(size for key, name, size in leaves if key == "generator" or name.startswith("gan."))
    mapped = sum(size for _, name, size in leaves if name.startswith("mapping."))
    models = round((sum(size for *_, size in leaves) - made - mapped) / model)
    beside = "L" if mapped else {0: "", 1: "G"}[round(made / generator)]
    return f"{models} + {beside}" if models and beside else beside or str(models)


def evaluated(passes: str) -> int:
    """A sum like ``3 E + 20``."""
    terms = passes.split(" + ")
    return sum(EPOCHS * int(term[:-1] or 1) if term.endswith("E") else int(term) for term in terms)


@pytest.mark.parametrize("name", IN_LATER_TASKS)
def test_the_second_table_tells_what_a_method_adds_in_later_tasks(name: str) -> None:
    algorithm = built(name)
    script = algorithm.round(began(algorithm), LATER_ROUND)
    request, job = next(script), "none"
    if isinstance(request, ServerJob):
        job = f"`{request.name}`, when a task begins"
        request = script.send(request.init())
    assert isinstance(request, Ask)
    program = algorithm.programs[request.program]
    down, passes, told, *_ = IN_LATER_TASKS[name]
    assert down == amount({key: tree for key, tree in request.shared.items() if key != "model"})
    assert program.passes == EPOCHS * {"E": 1, "4 E": 4, "(1 + S/B) E": 1 + SYNTHETIC / BATCH}[passes]
    nothing = Reply({"delta": zeros_like(request.shared["model"]), "locals": []}, ())
    with suppress(StopIteration):
        request = script.send(nothing)
        job = f"`{request.name}`, after each round" if isinstance(request, ServerJob) else job
    assert told == job


def test_the_sizes_of_generators_in_numbers_and_in_samples_are_told() -> None:
    for shape in (SHAPE, (1, 28, 28), (3, 32, 32)):
        generator = generator_for(shape)
        numbers = sum(leaf.numel() for leaf in generator.model.init(0).values())
        assert f"{numbers:,}" in PAGE
        assert f"{samples_of_equal_memory(generator):,}" in PAGE


def test_methods_that_remember_tasks_are_refused_on_every_other_stream() -> None:
    refused = {name for name in ALGORITHMS if fits(partial(build_algorithm, name, {}, ingredients())) == "no"}
    assert refused == IN_LATER_TASKS.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_first_table_tells_which_methods_take_the_reweighted_softmax(name: str) -> None:
    assert AT_A_GLANCE[name][-1] == fits(lambda: built(name, loss="wsm"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_methods_that_take_the_reweighted_softmax_take_the_losses_of_tasks(name: str) -> None:
    for loss in ("new_classes", "task_temperature"):
        made = ingredients(loss, in_tasks=True)
        assert AT_A_GLANCE[name][-1] == fits(lambda made=made: build_algorithm(name, {}, made))


def test_the_page_of_losses_names_the_methods_that_texts_do_not_go_with() -> None:
    named = set(re.findall(r"`(\w+)`", SECTIONS["token_cross_entropy"].partition("So are texts")[2]))
    texts = replace(ingredients("token_cross_entropy"), language=True, tokens=True)
    refused = {name for name in ALGORITHMS if fits(partial(build_algorithm, name, {}, texts)) == "no"}
    assert named == refused - IN_LATER_TASKS.keys()


def test_the_table_of_methods_holds_them_all() -> None:
    assert AT_A_GLANCE.keys() == ALGORITHMS.keys()


def test_the_table_of_strategies_tells_what_they_are_sent_need_and_cost() -> None:
    sent_what = r"(nothing|the model|below|\[below\]\(#[a-z-]+\))"
    rows = re.findall(rf"^\| `(\w+)` \| {sent_what} \| (\d|below) \| (yes|no) \|", PAGE, flags=re.MULTILINE)
    assert {name for name, *_ in rows} == {*STRATEGIES, "coordinated", "fedcbdr"} - {"none"}
    for name, sent, passes, labels in rows:
        assert labels == ("yes" if name in NEEDS_LABELS else "no")
        assert (sent == "nothing") == (name not in LOOKS_AT_MODEL)
        replayed = with_replay(built("fedavg"), ReplaySettings(name), ingredients())
        asked = {program: query.passes for program, query in replayed.programs.items() if program != "train"}
        if name == "coordinated":
            assert asked == {"gradient_sum": 3, "select": 2}
        else:
            assert sum(asked.values()) == float(passes)


def test_every_measure_of_forgetting_is_a_function() -> None:
    measures = re.findall(r"^\| `(\w+)`[^|]* \|[^|]+\|[^|]+(?:eq\.|section)[^|]+\|", PAGE, flags=re.MULTILINE)
    assert len(measures) == 10
    assert [name for name in measures if not callable(getattr(forgetting, name, None))] == []


def test_presets_that_the_pages_run_are_there() -> None:
    named = [name for name in re.findall(r"fedemu run (\S+)", PAGE) if not name.endswith(".toml")]
    assert len(named) > 5
    assert [name for name in named if not is_preset(name.replace("$method", "fedntd"))] == []
    parts = re.findall(r"`\+([a-z-]+)`", PAGE)
    assert len(parts) > 5
    assert [part for part in parts if not is_preset(f"digits+{part}")] == []
