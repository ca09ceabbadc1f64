"""Search: spaces as they are written, and a study that goes on where it was killed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedemu.ops.compare.paired import BETTER
from fedemu.ops.sweeps import search
from fedemu.ops.sweeps.search import BATCH, LESS_IS_BETTER, STUDY, Study, figure_of, parse_space
from fedemu.protocol.errors import ConfigurationError

SPACES = ["local.lr=0.001..1:log", "local.epochs=1..5", "model.hidden=[64],[64,64]"]


def values(choices: Any) -> dict[str, Any]:
    return dict(choices)


def result(choices: Any) -> float:
    return -abs(float(values(choices)["local.lr"]) - 0.1)


def play(folder: Path, trials: int, stops: int | None = None) -> Study:
    """Run trials; with ``stops`` only so many results are told, as if the search was killed then."""
    study = Study(folder, parse_space(SPACES), "final_accuracy", [3], {})
    while batch := study.batch(trials):
        assert len(batch) <= BATCH
        for number, choices in batch:
            if stops is not None and stops == number:
                return study
            study.tell(number, [result(choices)])
    return study


def test_ranges_of_numbers_and_lists_of_values_are_spaces() -> None:
    rate, epochs, hidden = parse_space(SPACES)
    assert (rate.low, rate.high, rate.log, rate.whole) == (0.001, 1.0, True, False)
    assert (epochs.low, epochs.high, epochs.log, epochs.whole) == (1, 5, False, True)
    assert hidden.choices == ([64], [64, 64])
    assert repr([space.least for space in (rate, epochs, hidden)]) == "[0.001, 1, [64]]"


def test_blanks_in_a_range_of_whole_numbers_leave_it_whole() -> None:
    assert parse_space(["local.epochs = 1 .. 5"]) == parse_space(["local.epochs=1..5"])


def test_a_study_lies_in_its_folder_whatever_this_is_called(tmp_path: Path) -> None:
    folder = tmp_path / "of today" / "a?b%20c{d}#e f"
    study = play(folder, 2)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folder / STUDY]
    assert play(folder, 2).over() == study.over()


def test_proposals_lie_in_their_spaces_and_the_best_comes_first(tmp_path: Path) -> None:
    study = play(tmp_path, 6)
    over = study.over()
    assert len(over) == 6
    assert over[0][2] == max(one[2] for one in over if one[2] is not None)
    for _, choices, _ in over:
        found = values(choices)
        assert 0.001 <= found["local.lr"] <= 1
        assert found["local.epochs"] in range(1, 6)
        assert found["model.hidden"] in ([64], [64, 64])


def test_a_search_that_was_killed_proposes_what_it_would_have_proposed(tmp_path: Path) -> None:
    whole = play(tmp_path / "whole", 2 * BATCH)
    play(tmp_path / "killed", 2 * BATCH, stops=BATCH + 1)
    again = play(tmp_path / "killed", 2 * BATCH)
    assert again.over() == whole.over()


def test_a_trial_that_was_half_proposed_when_the_search_was_killed_gets_the_values_that_it_would_have_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = 4 * BATCH  # Optuna draws the values of the first ten one by one, and those of the next together
    suggest, kills = search._suggest, [(1, "local.epochs"), (trials - 2, "local.epochs")]

    def killed(trial: Any, space: Any) -> None:
        if (trial.number, space.key) in kills:
            kills.remove((trial.number, space.key))
            raise KeyboardInterrupt
        suggest(trial, space)

    whole = play(tmp_path / "whole", trials)
    monkeypatch.setattr(search, "_suggest", killed)
    for _ in range(len(kills)):
        with pytest.raises(KeyboardInterrupt):
            play(tmp_path / "killed", trials)
    assert play(tmp_path / "killed", trials).over() == whole.over()


def test_a_trial_without_a_result_has_failed_and_comes_last(tmp_path: Path) -> None:
    study = Study(tmp_path, parse_space(SPACES), "final_accuracy", [3], {})
    first, second = study.batch(2)
    study.tell(first[0], [0.5, None])
    study.tell(second[0], [0.5, 0.7])
    assert [(number, value) for number, _, value in study.over()] == [(1, 0.6), (0, None)]


@pytest.mark.parametrize("figure", ["final_accuracy", "forgetting"])
def test_optuna_looks_for_what_is_best(tmp_path: Path, figure: str) -> None:
    import optuna

    study = Study(tmp_path, parse_space([*SPACES, "fleet.per_round=1..64:log"]), figure, [3], {})
    for (number, _), value in zip(study.batch(2), (0.5, 0.2), strict=True):
        study.tell(number, [value])
    kept = optuna.load_study(study_name="fedemu", storage=f"sqlite:///{tmp_path / STUDY}")
    assert kept.best_value == (0.2 if figure == "forgetting" else 0.5)
    assert kept.trials[0].distributions == {
        "local.lr": optuna.distributions.FloatDistribution(0.001, 1.0, log=True),
        "local.epochs": optuna.distributions.IntDistribution(1, 5),
        "model.hidden": optuna.distributions.CategoricalDistribution([0, 1]),
        "fleet.per_round": optuna.distributions.IntDistribution(1, 64, log=True),
    }


def test_of_what_is_better_if_it_is_lower_the_least_is_best(tmp_path: Path) -> None:
    assert {key for key in BETTER if LESS_IS_BETTER.search(key)} == {key for key in BETTER if BETTER[key] == "lower"}
    study = Study(tmp_path, parse_space(SPACES), "kept_objective", [3], {})
    for (number, _), value in zip(study.batch(2), (0.5, 0.2), strict=True):
        study.tell(number, [value])
    assert [value for _, _, value in study.over()] == [0.2, 0.5]


def test_the_search_of_a_folder_stays_the_same(tmp_path: Path) -> None:
    experiment = {"rounds": 2, "local": {"lr": 0.1, "epochs": (1, 2)}}
    begun = partial(Study, tmp_path)
    begun(parse_space(SPACES), "final_accuracy", [3, 4], experiment)
    begun(parse_space(SPACES), "final_accuracy", [3, 4], experiment)
    for what, spaces, figure, seeds, table in (
        ("other spaces", SPACES[:1], "final_accuracy", [3, 4], experiment),
        ("other figure", SPACES, "best_accuracy", [3, 4], experiment),
        ("other seed", SPACES, "final_accuracy", [4, 3], experiment),
        ("other seeds", SPACES, "final_accuracy", [3, 4, 5], experiment),
        (
            r"another experiment: there local\.lr is 0\.1, and here 0\.2",
            SPACES,
            "final_accuracy",
            [3, 4],
            {**experiment, "local": {"lr": 0.2, "epochs": (1, 2)}},
        ),
    ):
        with pytest.raises(ConfigurationError, match=f"begun with {what}; choose another --out"):
            begun(parse_space(spaces), figure, seeds, table)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "study.sqlite3").write_text("no data base, but a text that is longer than its head" * 40)
    told = r"study\.sqlite3 can't be used: .*file is not a database; remove it, or choose another --out$"
    with pytest.raises(ConfigurationError, match=told):
        Study(tmp_path / "other", parse_space(SPACES), "final_accuracy", [3], {})


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("local.lr", "is no space; write KEY=LOW..HIGH"),
        ("local.lr=1..0", "must be less than the second"),
        ("local.lr=0..1:log", "the first above 0 with :log"),
        ("local.lr=a..b", "needs two numbers"),
        ("local.lr=0.1", "is no space; write LOW..HIGH"),
        ("local.lr=0.1..inf", "needs two finite numbers that are less than 1e308 apart, as in 0.001..1"),
        ("local.lr=nan..1", "needs two finite numbers"),
        ("local.lr=-1e308..1e308", "needs two finite numbers"),
        ("seed=0..9", "varies the seed; write --seeds 0-9"),
        ("runtime.trainers=1..2", "changes no result"),
        ("local lr=0..1", "is no space; write KEY=LOW..HIGH"),
    ],
)
def test_a_mistake_is_one_sentence(option: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        parse_space([option])
    assert sentence in str(refused.value)


def test_a_metric_is_a_figure_of_a_run() -> None:
    known = ["final_accuracy", "forgetting"]
    assert [figure_of(metric, known) for metric in ("accuracy", *known)] == ["final_accuracy", *known]
    with pytest.raises(ConfigurationError, match="--metric forgeting is no figure of a run; did you mean forgetting"):
        figure_of("forgeting", known)
    with pytest.raises(ConfigurationError, match=r"; write one of accuracy, final_accuracy, forgetting$"):
        figure_of("speed", known)
