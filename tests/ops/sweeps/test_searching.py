"""Searches as they are run: what becomes of trials whose runs fail or diverge."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from fedemu.ops.sweeps import searching
from fedemu.ops.sweeps.plan import Part, Planned
from fedemu.ops.sweeps.runs import Failed, Progress
from fedemu.ops.sweeps.search import BATCH, Study, parse_space
from fedemu.ops.sweeps.searching import run_search
from fedemu.protocol.errors import ConfigurationError

PART = Part.model_construct(
    name="", experiments=["digits-small"], presets=[], methods=[], grid={}, seeds=[1, 2], set=[]
)


class Fleet:
    """Stands in for the runs: those in ``fails`` fail, and all others have the result ``value``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fails: set[str] = set()
        self.value: float | None = 0.5
        self.played: list[list[str]] = []
        self.later: list[int] = []
        self.finished: list[str] = []
        monkeypatch.setattr(searching, "play", self._play)
        monkeypatch.setattr(searching, "finish", self._finish)
        monkeypatch.setattr(searching, "_value", lambda directory, figure: self.value)

    def _play(self, folder: Path, runs: Sequence[Planned], progress: Progress, gpus: Sequence[str]) -> list[Failed]:
        self.played.append([_place(run) for run in runs])
        self.later.append(progress.later)
        return [Failed(run, 3, "no quorum") for run in runs if _place(run) in self.fails]

    def _finish(self, folder: Path, runs: Sequence[Planned], failed: Sequence[Failed]) -> int:
        self.finished = [_place(run) for run in runs]
        print("the comparison", file=sys.stderr)
        return failed[0].code if failed else 0


def _place(run: Planned) -> str:
    """The number of a trial and its seed, as in ``001/seed-1``."""
    return f"{run.name.removeprefix('trial-')[:3]}/{run.folder.name}"


def search(folder: Path, trials: int) -> tuple[int, Study]:
    study = Study(folder, parse_space(["local.lr=0.1..1"]), "final_accuracy", [1], {})
    return run_search(folder, PART, lambda: study, trials, 1, "again"), study


def test_a_trial_with_a_run_that_failed_is_tried_again_before_others_are_proposed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)
    fleet.fails = {"002/seed-2", "003/seed-1"}
    code, study = search(tmp_path, BATCH + 1)
    assert code == 3
    assert [number for number, _, _ in study.over()] == [0, 3]
    both = [f"{number}/seed-{seed}" for number in ("002", "003") for seed in (1, 2)]
    assert {*both} < set(fleet.finished)
    assert len(fleet.finished) == 2 * BATCH

    fleet.fails = set()
    fleet.played.clear()
    code, study = search(tmp_path, BATCH + 1)
    assert (code, fleet.played) == (0, [both, ["005/seed-1", "005/seed-2"]])
    assert fleet.later == [2, 2, 0], "the runs of the trials that are not proposed yet"
    assert [value for _, _, value in study.over()] == [0.5] * (BATCH + 1)
    *_, best, _, command = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"best of {BATCH + 1} trials: trial \d+ with local\.lr = \S+: final_accuracy 50\.0 %", best)
    assert command.startswith("fedemu run digits-small --set local.lr="), "it can be copied from the end"


@pytest.mark.parametrize(("seeds", "end"), [([1, 2], " --seeds 1,2"), ([7], " --seed 7"), ([1], "")])
def test_the_command_that_runs_the_best_trial_alone_has_the_seeds_of_the_search(
    seeds: list[int], end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Fleet(monkeypatch)
    study = Study(tmp_path, parse_space(["local.epochs=1,2"]), "final_accuracy", [1], {})
    assert run_search(tmp_path, PART.model_copy(update={"seeds": seeds}), lambda: study, 1, 1, "again") == 0
    command = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"fedemu run digits-small --set local\.epochs=[12]{end}", command)


def test_a_search_that_goes_on_finds_the_number_of_runs_at_a_time_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)
    for trials in (1, 2):
        begun = partial(Study, tmp_path, parse_space(["local.lr=0.1..1"]), "final_accuracy", [1], {})
        assert run_search(tmp_path, PART, begun, trials, None, "again") == 0
        told = capsys.readouterr().err
        much = rf"search: {trials} trials? with 2 seeds, {trials - 1} of them over already, \d+ runs? at a time \("
        assert re.match(much, told)
        assert f"\ntrial {trials} of {trials}: local.lr=0." in told
    assert fleet.played == [["001/seed-1", "001/seed-2"], ["002/seed-1", "002/seed-2"]]


def test_a_trial_that_fails_twice_has_no_result_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)
    fleet.fails = {"002/seed-2"}
    search(tmp_path, BATCH + 1)
    fleet.played.clear()
    code, study = search(tmp_path, BATCH + 1)
    assert code == 3, "the run that failed is told"
    assert fleet.played == [["002/seed-1", "002/seed-2"], ["005/seed-1", "005/seed-2"]]
    assert sorted(study.over(), key=lambda trial: trial[0])[1][2] is None
    assert sorted(fleet.finished).count("002/seed-2") == 1
    assert "trial 2 failed for the second time" in capsys.readouterr().err

    code, study = search(tmp_path, BATCH + 2)
    assert (code, fleet.played[2:]) == (0, [["006/seed-1", "006/seed-2"]])


def test_a_trial_that_diverges_has_no_result_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)
    fleet.value = None
    code, study = search(tmp_path, BATCH + 1)
    assert code == 0
    assert [value for _, _, value in study.over()] == [None] * (BATCH + 1)
    assert "none of 5 trials has a result\n" in capsys.readouterr().err


def test_a_trial_whose_values_do_not_go_with_the_experiment_has_no_result_and_the_search_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)
    study = Study(tmp_path, parse_space(["fleet.per_round=1..60"]), "final_accuracy", [1], {})
    trials = BATCH + 2
    assert run_search(tmp_path, PART, lambda: study, trials, 1, "again") == 0
    results = {number: (choices[0][1], value) for number, choices, value in study.over()}
    wrong = {number for number, (per_round, _) in results.items() if per_round > 20}
    assert len(results) == trials
    assert wrong
    assert {number for number, (_, value) in results.items() if value is None} == wrong
    told = capsys.readouterr().err
    for number in range(trials):
        sentence = rf"^trial {number + 1} has no result: .* is more than fleet\.devices = 20; "
        assert bool(re.search(sentence, told, re.MULTILINE)) == (number in wrong)
    right = sorted(set(range(trials)) - wrong)
    played = [place for places in fleet.played for place in places]
    assert played == [f"{number + 1:03d}/seed-{seed}" for number in right for seed in (1, 2)]


def test_values_that_a_method_refuses_end_their_trial_and_not_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)
    part = PART.model_copy(update={"set": [*PART.set, "algorithm.name=fedprox"]})
    study = Study(tmp_path, parse_space(["algorithm.options.mu=-1.0..1.0"]), "final_accuracy", [1], {})
    assert run_search(tmp_path, part, lambda: study, BATCH, 1, "again") == 0
    refused = {number for number, choices, _ in study.over() if choices[0][1] < 0}
    assert 0 < len(refused) < BATCH
    told = capsys.readouterr().err
    for number in range(BATCH):
        sentence = rf"^trial {number + 1} has no result: .* does not fit 'fedprox'"
        assert bool(re.search(sentence, told, re.MULTILINE)) == (number in refused)
    assert {place[:3] for places in fleet.played for place in places} == {
        f"{number + 1:03d}" for number in range(BATCH) if number not in refused
    }


def test_a_search_ends_also_if_no_values_go_with_the_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)
    study = Study(tmp_path, parse_space(["fleet.per_round=30..60"]), "final_accuracy", [1], {})
    assert run_search(tmp_path, PART, lambda: study, BATCH + 1, 1, "again") == 0
    assert fleet.played == []
    assert "none of 5 trials has a result\n" in capsys.readouterr().err


def test_a_search_of_which_every_run_failed_says_that_there_is_no_result_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)
    fleet.fails = {"001/seed-1", "001/seed-2"}
    code, study = search(tmp_path, 1)
    assert (code, study.over()) == (3, [])
    assert capsys.readouterr().err.endswith("no trial has a result yet\n")


def test_an_interrupted_search_says_how_to_go_on_and_does_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)

    def interrupt(*_: object, **__: object) -> list[Failed]:
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(searching, "play", interrupt)
        code, study = search(tmp_path, 1)
    assert (code, study.over()) == (4, [])
    assert capsys.readouterr().err.endswith("search interrupted; go on with what is left by\nagain\n")
    assert search(tmp_path, 1)[0] == 0
    assert fleet.played == [["001/seed-1", "001/seed-2"]]


@pytest.mark.parametrize(("outcome", "result"), [("completed", 0.25), ("diverged", None), ("interrupted", None)])
def test_only_a_run_that_completed_has_a_result(tmp_path: Path, outcome: str, result: float | None) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"round": 1, "accuracy": 0.75}\n{"round": 2, "accuracy": 0.25}\n')
    assert searching._value(tmp_path, "final_accuracy") is None
    (tmp_path / "summary.json").write_text(f'{{"outcome": "{outcome}"}}')
    assert searching._value(tmp_path, "final_accuracy") == result
    assert searching._value(tmp_path / "nowhere", "final_accuracy") is None


def test_a_figure_that_no_run_has_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(monkeypatch)
    fleet.value = None
    monkeypatch.setattr(searching, "_completed", lambda directory: directory)
    study = Study(tmp_path, parse_space(["local.lr=0.1..1"]), "last_accuracy", [1], {})
    assert run_search(tmp_path, PART, lambda: study, 1, 1, "again") == 0
    told = "none of 1 trial has a result: runs completed without a last_accuracy, which needs 100 rounds\n"
    assert told in capsys.readouterr().err


def test_trials_at_the_same_time_cannot_serve_their_metrics_on_one_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(monkeypatch)
    study = Study(tmp_path, parse_space(["local.lr=0.1..1"]), "final_accuracy", [1], {})
    part = PART.model_copy(update={"set": ["runtime.metrics_port=9464"]})
    with pytest.raises(ConfigurationError, match=r"^runtime\.metrics_port = 9464 serves the metrics of one run, and 2"):
        run_search(tmp_path, part, lambda: study, 1, 2, "again")
    assert run_search(tmp_path, part, lambda: study, 1, 1, "again") == 0
    assert fleet.played == [["001/seed-1", "001/seed-2"]]
