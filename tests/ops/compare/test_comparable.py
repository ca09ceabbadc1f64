"""Which experiments compare, and what people are told where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from fedemu.ops.compare.comparable import compares, data_named, incomparable
from fedemu.ops.compare.entry import BY_PERIOD
from fedemu.ops.compare.paired import BETTER
from fedemu.ops.experiment import Experiment

TEXT = {
    "data": {"dataset": "mine", "text": {"kind": "next"}},
    "model": {"name": "gru"},
    "algorithm": {"loss": "token_cross_entropy"},
}
OF_WRITERS = {"data": {"dataset": "mine", "id_column": "writer"}}
PERIODS = {"stream": {"kind": "periods", "periods": 3}}
HELD_OUT = "periods periods 3 order index cut device test_fraction"
TESTED_WRITERS = {"data": {"dataset": "mine", "test_by": "id", "id_column": "writer"}}
OFTEN_SEEN = {"data": {"dataset": "mine", "id_min_samples": 5, "partition": {"kind": "natural", "column": "writer"}}}
PEOPLE = "the column that tells people apart"
ACCURACIES = "their accuracies"
BY_CLASS = "their forgetting, round forgetting and consistency"


def table(settings: dict[str, Any], section: str = "name", change: Any = "other") -> dict[str, Any]:
    """The table of an experiment with these settings, of which a section or a value is then changed."""
    value = {**settings.get(section, {}), **change} if isinstance(change, dict) else change
    return Experiment.parse({"name": "other", **settings, section: value}).table()


@pytest.mark.parametrize(
    ("settings", "section", "change", "said", "figures"),
    [
        (OF_WRITERS, "data", {"test_by": "id"}, "data.test_by (label, id)", ACCURACIES),
        (OF_WRITERS, "data", {"id_min_samples": 5}, "data.id_min_samples (0, 5)", ACCURACIES),
        (TESTED_WRITERS, "data", {"id_column": "speaker"}, f"{PEOPLE} (writer, speaker)", ACCURACIES),
        (OFTEN_SEEN, "data", {"id_column": "speaker"}, f"{PEOPLE} (writer, speaker)", ACCURACIES),
        (OF_WRITERS, "data", {"train_split": "train+extra"}, "data.train_split (auto, train+extra)", ACCURACIES),
        (OF_WRITERS, "data", {"label_column": "domain"}, "data.label_column (auto, domain)", ACCURACIES),
        (OF_WRITERS, "data", {"regroup": "superimagenet-s"}, "data.regroup (none, superimagenet-s)", ACCURACIES),
        (TEXT, "data", {"text": {"kind": "next", "length": 16}}, "data.text (next length 32 vocabulary", ACCURACIES),
        (PERIODS, "stream", {"test_fraction": 0.5}, f"the test samples ({HELD_OUT} 0.2, {HELD_OUT} 0.5)", ACCURACIES),
        ({}, "stream", {"kind": "periods", "periods": 3}, f"the test samples (the test split, {HELD_OUT}", ACCURACIES),
    ],
)
def test_what_does_not_compare_is_told_and_not_tested(
    settings: dict[str, Any], section: str, change: Any, said: str, figures: str
) -> None:
    one, other = table(settings), table(settings, section, change)
    (warning,) = incomparable([one, other, one])
    assert warning.startswith(f"the runs differ in {said}")
    assert warning.endswith(f"), so {figures} do not compare")
    assert not any(compares(one, other, key) for key in BETTER)
    assert all(compares(other, other, key) for key in BETTER)


TASKS = {"stream": {"kind": "classes", "tasks": 5}}
DRIFT = {"stream": {"kind": "drift", "periods": 4}}
ROUNDS = "their best accuracies, those of the last rounds and the rounds to a target"
FIVE = "the periods of their tests (classes tasks 5 order []"
FOUR = "the periods of their tests (drift periods 4 column label cut fleet alpha 0.3"
AT_INTERVALS = {"forgetting", "round_forgetting", "consistency"}
OF_ROUNDS = {"best_accuracy", "last_accuracy"}
EVERY_TENTH = {"samples": 50, "full_every": 10}


@pytest.mark.parametrize(
    ("settings", "section", "change", "said", "untested"),
    [
        (
            {},
            "evaluate",
            {"every": 5},
            [
                f"the rounds between two tests by class (1, 5), so {BY_CLASS}",
                f"evaluate (every 1, every 5), so {ROUNDS}",
            ],
            AT_INTERVALS | OF_ROUNDS,
        ),
        (
            {"evaluate": {"every": 10}},
            "evaluate",
            {"every": 1, **EVERY_TENTH},
            [f"evaluate (every 10, every 1 samples 50 full_every 10), so {ROUNDS}"],
            OF_ROUNDS,
        ),
        (TASKS, "stream", {"tasks": 2}, [f"{FIVE}, classes tasks 2 order []), so"], {}),
        (TASKS, "stream", {"order_by": "device"}, [f"{FIVE}, classes tasks 5 order [] order_by"], {}),
        (DRIFT, "stream", {"alpha": 3.0}, [f"{FOUR}, drift"], {}),
        (DRIFT, "stream", {"kind": "window"}, [f"{FOUR}, window"], {}),
    ],
)
def test_figures_that_other_tests_would_change_are_told_and_not_tested_and_the_last_accuracies_are(
    settings: dict[str, Any], section: str, change: Any, said: list[str], untested: set[str]
) -> None:
    one, other = table(settings), table(settings, section, change)
    told = incomparable([one, other, one])
    assert len(told) == len(said)
    for warning, start in zip(told, said, strict=True):
        assert warning.startswith(f"the runs differ in {start}")
        assert warning.endswith(" do not compare")
    assert {key for key in BETTER if not compares(one, other, key)} == (untested or {*BY_PERIOD} & {*BETTER})
    assert all(compares(other, other, key) for key in BETTER)


def test_the_number_of_rounds_is_told_and_tested_all_the_same() -> None:
    one, other = table({}, "rounds", 8), table({}, "rounds", 9)
    said = "the runs differ in rounds (8, 9), so the figures of their last models do not compare"
    assert incomparable([one, other]) == [said]
    assert compares(one, other, "final_accuracy")


@pytest.mark.parametrize(
    ("settings", "section", "change"),
    [
        ({}, "evaluate", {"full_every": 5}),
        (TASKS, "stream", {"rounds_per_task": 9}),
        (DRIFT, "stream", {"rounds_per_period": 9}),
        ({}, "local", {"lr": 0.5}),
        (OF_WRITERS, "data", {"id_column": "speaker"}),
        (TESTED_WRITERS, "data", {"id_column": "auto", "partition": {"kind": "natural", "column": "writer"}}),
        (PERIODS, "stream", {"rounds_per_period": 9}),
        ({"model": {"name": "mlp"}}, "model", {"hidden": [64]}),
    ],
)
def test_what_changes_no_test_is_no_difference(settings: dict[str, Any], section: str, change: Any) -> None:
    one, other = table(settings), table(settings, section, change)
    assert one != other
    assert incomparable([one, other]) == []
    assert all(compares(one, other, key) for key in BETTER)


def test_the_options_of_a_model_say_the_same_in_any_order() -> None:
    one = table({}, "model", {"name": "gru", "layers": 2, "hidden": 8})
    other = table({}, "model", {"hidden": 8, "layers": 2, "name": "gru"})
    assert list(one["model"]) != list(other["model"])
    assert incomparable([one, other]) == []


def test_models_differ_where_one_leaves_out_what_another_sets() -> None:
    one, other = table({}, "model", {"name": "mlp"}), table({}, "model", {"name": "mlp", "hidden": [8]})
    (said,) = incomparable([one, other])
    assert said.startswith("the runs differ in model (mlp hidden [64] projection 0, mlp hidden [8] projection 0)")


@pytest.mark.parametrize(
    ("settings", "change", "same"),
    [
        ({}, {"data": {"partition": {"kind": "iid"}}}, True),
        ({}, {"data": {"validation": 0.1, "public": {"fraction": 0.1}}}, True),
        ({}, {"algorithm": {"loss": "wsm"}, "rounds": 3, "seed": 4}, True),
        ({}, {"stream": {"kind": "drift"}}, True),
        ({}, {"stream": {"kind": "periods", "order": "label"}}, True),
        ({}, {"data": {"dataset": "mnist"}}, False),
        ({}, {"data": {"image_size": 16}}, False),
        ({}, {"data": {"test_fraction": 0.5}}, False),
        ({}, {"data": {"partition": {"kind": "natural", "column": "writer"}}}, False),
        ({}, {"stream": {"kind": "drift", "column": "writer"}}, False),
        ({}, {"stream": {"kind": "periods", "order": "writer"}}, False),
        ({"stream": {"kind": "drift", "column": "day"}}, {"stream": {"kind": "window", "column": "day"}}, True),
        ({"stream": {"kind": "drift", "column": "day"}}, {"stream": {"kind": "periods", "order": "day"}}, False),
    ],
)
def test_data_are_named_by_what_is_read_and_not_by_how_samples_are_divided(
    settings: dict[str, Any], change: dict[str, Any], same: bool
) -> None:
    one, other = (Experiment.parse({"name": "x", **each}).table() for each in (settings, change))
    assert (data_named(one) == data_named(other)) == same


def test_settings_that_tell_of_no_data_name_the_same() -> None:
    assert data_named({}) == data_named({"rounds": 3})
