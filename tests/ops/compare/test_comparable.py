"""Which experiments compare, and what people are told where they do not."""

from __future__ import annotations

from typing import Any

import pytest

from fedemu.ops.compare.comparable import compares, incomparable
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
        ({}, "evaluate", {"every": 5}, "the rounds between two tests by class (1, 5)", BY_CLASS),
        (
            {},
            "evaluate",
            {"every": 2, "samples": 50, "full_every": 20},
            "the rounds between two tests by class (1, 20)",
            BY_CLASS,
        ),
    ],
)
def test_what_does_not_compare_is_told_and_not_tested(
    settings: dict[str, Any], section: str, change: Any, said: str, figures: str
) -> None:
    one, other = table(settings), table(settings, section, change)
    (warning,) = incomparable([one, other, one])
    assert warning.startswith(f"the runs differ in {said}")
    assert warning.endswith(f"), so {figures} do not compare")
    assert compares(one, other, "final_accuracy") == (figures == BY_CLASS)
    assert not compares(one, other, "round_forgetting")
    assert compares(other, other, "round_forgetting")


def test_the_number_of_rounds_is_told_and_tested_all_the_same() -> None:
    one, other = table({}, "rounds", 8), table({}, "rounds", 9)
    said = "the runs differ in rounds (8, 9), so the figures of their last models do not compare"
    assert incomparable([one, other]) == [said]
    assert compares(one, other, "final_accuracy")


@pytest.mark.parametrize(
    ("settings", "section", "change"),
    [
        ({}, "evaluate", {"full_every": 5}),
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
    assert compares(one, other, "round_forgetting")


def test_the_options_of_a_model_say_the_same_in_any_order() -> None:
    one = table({}, "model", {"name": "gru", "layers": 2, "hidden": 8})
    other = table({}, "model", {"hidden": 8, "layers": 2, "name": "gru"})
    assert list(one["model"]) != list(other["model"])
    assert incomparable([one, other]) == []


def test_models_differ_where_one_leaves_out_what_another_sets() -> None:
    one, other = table({}, "model", {"name": "mlp"}), table({}, "model", {"name": "mlp", "hidden": [8]})
    (said,) = incomparable([one, other])
    assert said.startswith("the runs differ in model (mlp hidden [64] projection 0, mlp hidden [8] projection 0)")
