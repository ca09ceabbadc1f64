"""Suites: their sizes, their methods, and the table that they end in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedemu.ops.experiment.presets import names_in
from fedemu.ops.experiment.sources import load_experiment
from fedemu.ops.sweeps.plan import Part, runs_of
from fedemu.ops.sweeps.standing import lines, overview, text, write_standing
from fedemu.ops.sweeps.suite import SUITES, open_suite, planned_suite, seconds_of, with_data
from fedemu.protocol.errors import ConfigurationError, DataError

MINE = """
[[parts]]
name = "one"
presets = ["digits-small"]
methods = ["fedavg", "wsm"]
seconds = 2
slow = { wsm = 5 }
tuned = { ewc = ["local.lr=0.1"] }
sizes.tiny = { seeds = [0], methods = ["wsm", "ewc"], rounds = 2, seconds = 1 }
sizes.small = { seeds = "0-1", set = ["local.lr=0.5"] }

[[parts]]
name = "two"
presets = ["digits-drift"]
methods = ["fedavg"]
rounds = 3
sizes.small = { seeds = [0] }
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return str(path)


def written(directory: Path, accuracy: float, forgetting: float, outcome: str = "completed") -> None:
    directory.mkdir(parents=True)
    row = {"round": 1, "accuracy": accuracy, "round_forgetting": forgetting, "accepted": 4}
    row |= {"bytes_down": 10, "bytes_up": 5}
    (directory / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (directory / "summary.json").write_text(json.dumps({"outcome": outcome}))


def test_a_size_says_which_parts_methods_seeds_and_settings_are_run(mine: str) -> None:
    tiny = planned_suite(open_suite(mine, "tiny", []), None)
    assert [(str(run.folder), run.overrides) for run in tiny] == [
        ("one/digits-small+wsm/seed-0", ("rounds=2",)),
        ("one/digits-small+ewc/seed-0", ("rounds=2", "local.lr=0.1")),
    ]
    assert seconds_of(tiny) == 5 + 1
    small = planned_suite(open_suite(mine, "small", []), None)
    assert [str(run.folder) for run in small] == [
        "one/digits-small+fedavg/seed-0",
        "one/digits-small+wsm/seed-0",
        "two/digits-drift+fedavg/seed-0",
        "one/digits-small+fedavg/seed-1",
        "one/digits-small+wsm/seed-1",
    ]
    assert [run.overrides for run in small[1:3]] == [("local.lr=0.5",), ("rounds=3",)]
    assert seconds_of(small) == 14


def test_a_method_of_ones_own_is_run_on_every_stream_or_alone(mine: str) -> None:
    added = planned_suite(open_suite(mine, "small", ["own:Mine"]), "Mine/seed-0")
    assert [str(run.folder) for run in added] == ["one/digits-small+Mine/seed-0", "two/digits-drift+Mine/seed-0"]
    assert [str(run.group) for run in planned_suite(open_suite(mine, "small", ["wsm"]), "seed-0")] == [
        "one/digits-small+fedavg",
        "one/digits-small+wsm",
        "two/digits-drift+fedavg",
        "two/digits-drift+wsm",
    ]
    alone = planned_suite(open_suite(mine, "tiny", ["own:Mine"], own_only=True), None)
    assert [run.overrides for run in alone] == [('algorithm.name="own:Mine"', "rounds=2")]


def test_a_part_without_presets_gets_no_method_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fixed.toml"
    fixed = '[[parts]]\nname = "fixed"\nexperiments = ["digits-small"]\nsizes.tiny = {}\n'
    path.write_text(fixed)
    with pytest.raises(ConfigurationError, match="its parts have no presets that one could follow"):
        open_suite(str(path), "tiny", ["wsm"])
    assert [part.name for part in open_suite(str(path), "tiny", [])] == ["fixed"]
    path.write_text(fixed + fixed.replace("fixed", "both") + 'presets = ["churn"]\n')
    for own_only, folders in (
        (False, ["fixed/digits-small", "both/digits-small", "both/churn+wsm"]),
        (True, ["both/churn+wsm"]),
    ):
        runs = planned_suite(open_suite(str(path), "tiny", ["wsm"], own_only), None)
        assert [str(run.group) for run in runs] == folders
        assert capsys.readouterr().err == "fixed gets no run of wsm: it has no presets that a method could follow\n"


def test_the_table_ranks_the_methods_of_each_stream_with_their_spread(tmp_path: Path, mine: str) -> None:
    runs = planned_suite(open_suite(mine, "small", []), None)
    written(tmp_path / "one/digits-small+fedavg/seed-0", 0.5, 0.2)
    written(tmp_path / "one/digits-small+fedavg/seed-1", 0.7, 0.2)
    written(tmp_path / "one/digits-small+wsm/seed-0", 0.8, 0.1)
    written(tmp_path / "one/digits-small+wsm/seed-1", 0.0, 0.9, "interrupted")
    standing = lines(tmp_path, runs)
    assert [(line.method, line.runs, line.planned) for line in standing["one"]] == [("wsm", 1, 2), ("fedavg", 2, 2)]
    together = overview(standing)
    assert together.pop("method") == ["wsm", "fedavg"]
    assert together == {
        "one: accuracy": ["80.0 % (1 of 2)", "60.0 ± 14.1 %"],
        "one: forgetting": ["10.0 % (1 of 2)", "20.0 %"],
        "two: accuracy": ["", "–"],
        "two: forgetting": ["", "–"],
    }
    shown = text(standing)
    assert shown.startswith("| method | one: accuracy   | one: forgetting | two: accuracy | two: forgetting |")
    assert "60.0 ± 14.1 %" in shown
    assert "| fedavg | 60.0 ± 14.1 %   | 20.0 %          | 15.0 B          | 4          | 2 of 2 |" in shown
    alone = text({"one": [replace(standing["one"][0], method="a|b")]}).splitlines()
    assert alone[:5] == [
        "one",
        "",
        "| method | accuracy        | forgetting      | bytes           | updates    | runs   |",
        "|--------|-----------------|-----------------|-----------------|------------|--------|",
        "| a\\|b   | 80.0 % (1 of 2) | 10.0 % (1 of 2) | 15.0 B (1 of 2) | 4 (1 of 2) | 1 of 2 |",
    ]
    table = write_standing(tmp_path, standing)
    assert (table, table.read_text()) == (tmp_path / "suite.md", shown + "\n")
    numbers = table.with_suffix(".csv").read_text().splitlines()
    assert numbers[0].startswith("stream,method,runs,planned,diverged,accuracy_mean,accuracy_sd,forgetting_mean")
    assert numbers[1].startswith("one,wsm,1,2,0,0.8,,0.1,")


def test_a_run_that_was_completed_with_fewer_rounds_than_it_is_to_have_takes_no_part(tmp_path: Path, mine: str) -> None:
    runs = planned_suite(open_suite(mine, "small", []), None)
    for seed, rounds in ((0, 1), (1, 3)):
        place = tmp_path / f"two/digits-drift+fedavg/seed-{seed}"
        written(place, 0.5, 0.25)
        (place / "config.toml").write_text("rounds = 3\n")
        (place / "summary.json").write_text(json.dumps({"outcome": "completed", "rounds": rounds}))
    two = [replace(run, seed=seed) for run in runs if run.part == "two" for seed in (0, 1)]
    standing = lines(tmp_path, two)
    assert (standing["two"][0].runs, standing["two"][0].planned) == (1, 2)
    assert overview(standing)["two: accuracy"] == ["50.0 % (1 of 2)"]


def test_a_method_that_diverged_in_the_first_period_has_no_forgetting_of_earlier_ones(
    tmp_path: Path, mine: str
) -> None:
    runs = planned_suite(open_suite(mine, "small", []), None)
    for part, period_accuracy in (("one/digits-small+fedavg", None), ("two/digits-drift+fedavg", [0.5, 0.1])):
        place = tmp_path / part / "seed-0"
        written(place, 0.3, 0.25, "diverged")
        row = json.loads((place / "metrics.jsonl").read_text()) | {"period_accuracy": period_accuracy}
        (place / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    standing = lines(tmp_path, runs)
    assert [standing["one"][0].forgetting.mean, standing["two"][0].forgetting.mean] == [0.25, None]


def test_a_run_that_diverged_in_its_first_round_takes_no_part_in_bytes_and_updates(tmp_path: Path, mine: str) -> None:
    runs = planned_suite(open_suite(mine, "small", []), None)
    written(tmp_path / "one/digits-small+fedavg/seed-0", 0.5, 0.2)
    for place in ("one/digits-small+fedavg/seed-1", "two/digits-drift+fedavg/seed-0"):
        written(tmp_path / place, 0.3, 0.2, "diverged")
        (tmp_path / place / "metrics.jsonl").write_text("")
    standing = lines(tmp_path, runs)
    fedavg = standing["one"][0]
    assert (fedavg.bytes.values, fedavg.updates.values) == ((15, None), (4, None))
    assert "| 15.0 B (1 of 2) | 4 (1 of 2) | 2 of 2, 1 diverged |" in text(standing)
    assert overview(standing)["one: accuracy"] == ["50.0 % (1 of 2), 1 diverged", "–"]
    assert (standing["two"][0].bytes.mean, standing["two"][0].updates.mean) == (None, None)
    place = tmp_path / "one/digits-small+wsm/seed-0"
    written(place, 0.0, 0.2)
    rows = [{"round": 1, "bytes_up": 5}, {"round": 2, "accepted": 3}]
    (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wsm = lines(tmp_path, runs)["one"][1]
    assert (wsm.method, wsm.bytes.values, wsm.updates.values) == ("wsm", (5, None), (3, None)), (
        "what is not told counts as none"
    )


def test_points_of_a_grid_and_presets_with_the_same_method_have_lines_of_their_own(tmp_path: Path) -> None:
    parts = [
        Part(name="rates", presets=["digits"], methods=["wsm"], grid={"local.lr": [0.1, 1.0]}),
        Part(name="streams", presets=["digits", "churn"], methods=["wsm"]),
        Part(name="fixed", experiments=["churn"]),
    ]
    together = overview(lines(tmp_path, [run for part in parts for run in runs_of(part)]))
    assert together["method"] == ["wsm, local.lr=0.1", "wsm, local.lr=1.0", "digits+wsm", "churn+wsm", "churn"]
    assert together["rates: accuracy"] == ["–", "–", "", "", ""]


def test_an_unknown_suite_or_size_is_met_with_those_that_there_are(mine: str) -> None:
    with pytest.raises(ConfigurationError, match='no suite "forgeting"; did you mean forgetting'):
        open_suite("forgeting", "small", [])
    with pytest.raises(ConfigurationError, match='has no size "huge"; it has tiny, small'):
        open_suite(mine, "huge", [])


def test_a_part_of_whose_data_some_are_missing_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDEMU_DATA", str(tmp_path))
    here = Part(name="here", presets=["digits"], experiments=["churn"])
    of_preset, of_experiment = Part(name="one", presets=["shakespeare"]), Part(name="two", experiments=["shakespeare"])
    of_both = Part(name="three", presets=["digits"], experiments=["shakespeare"])
    assert with_data([of_preset, here, of_experiment, of_both]) == [here]
    told = capsys.readouterr().err
    assert [f"{name} is left out: " in told for name in ("one", "here", "two", "three")] == [True, False, True, True]
    with pytest.raises(DataError, match="the data of no part are here"):
        with_data([of_preset, of_both])
    with pytest.raises(DataError, match=r"there is no file .*tinyshakespeare"):
        with_data([of_preset])


@pytest.mark.parametrize("name", names_in(SUITES))
def test_the_shipped_suites_hold_experiments_that_can_be_read(name: str) -> None:
    for size in ("tiny", "quick", "small", "full"):
        runs = planned_suite(open_suite(name, size, []), None)
        assert all(run.seconds for run in runs)
        for run in {(run.experiment, run.overrides): run for run in runs}.values():
            load_experiment(run.experiment, run.overrides, {})
