"""The results of a run, read from its directory."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.ops.experiment import Experiment
from fedemu.ops.results.periods import period_results
from fedemu.ops.results.results import Results
from fedemu.ops.running.folder import claim

Write = Callable[..., None]
EXPERIMENT = Experiment(name="tiny", rounds=3)


@pytest.fixture(autouse=True)
def _in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_periods_may_lack_a_loss_and_a_single_perplexity_tells_language_data() -> None:
    reached = ((1, 0, None), (2, 0, None), (3, 1, 9.0))
    rows = [
        Row(round=round, task=task, period_accuracy=(0.5, 0.25, round / 10), perplexity=perplexity)
        for round, task, perplexity in reached
    ]
    found = period_results(Run(Path(), "", rows, (), {}))
    assert found is not None
    assert (found.rounds, found.language) == ((2, 3), True)
    assert found.accuracy.tolist() == [[0.5, 0.25, 0.2], [0.5, 0.25, 0.3]]
    assert found.loss.shape == (2, 3)
    assert all(math.isnan(loss) for loss in found.loss.flat)


def test_periods_and_perplexity_are_told_at_the_end_of_a_run(write_summary: Write) -> None:
    directory = claim(EXPERIMENT, None)
    with RunDirectory(directory) as run:
        run.metrics(Row(round=1, accuracy=0.5, perplexity=53.517))
        run.metrics(Row(round=2))
    matrix = [[0.8, 0.2, 0.1], [0.5, 0.6, 0.1]]
    measures = {
        "average_accuracy": 0.55,
        "average_incremental_accuracy": 0.675,
        "average_forgetting": 0.3,
        "backward_transfer": None,
    }
    write_summary(directory, periods={"rounds": [2, 3], "accuracy": matrix, **measures})
    results = Results.read(directory)
    assert results.perplexity == 53.517
    assert results.to_text().splitlines()[1:3] == [
        "  accuracy  87.5 %  (best 90.0 %)  perplexity 53.52",
        "  periods   2 of 3, average accuracy 55.0 %, average incremental accuracy 67.5 %, forgetting 30.0 %",
    ]


def test_a_perplexity_too_large_for_a_float_is_not_replaced_by_that_of_an_earlier_model(write_summary: Write) -> None:
    directory = claim(EXPERIMENT, None)
    with RunDirectory(directory) as run:
        run.metrics(Row(round=1, accuracy=0.5, loss=3.98, perplexity=53.517))
        run.metrics(Row(round=2, accuracy=0.25, loss=800.0, perplexity=math.inf))
    write_summary(directory)
    results = Results.read(directory)
    assert results.perplexity is None
    assert "perplexity" not in results.to_text()


def test_the_cause_of_a_divergence_is_told_unless_a_resumed_run_went_on(write_summary: Write) -> None:
    directory = claim(EXPERIMENT, None)
    with RunDirectory(directory) as run:
        for cause in ("1 reply of round 6 was not finite", "3 replies of round 7 were not finite"):
            run.event("diverged", 1.0, 2.0, detail=cause)
        run.event("leave", 1.0, 2.0, detail="no cause")
    write_summary(directory, outcome="diverged")
    assert Results.read(directory).to_text().splitlines()[1] == "  cause     3 replies of round 7 were not finite"
    write_summary(directory, outcome="completed")
    assert Results.read(directory).cause == ""


def test_devices_are_counted_once_a_round_is_over(write_summary: Write) -> None:
    directory = claim(EXPERIMENT, None)
    for rounds, told in ((0, []), (1, ["  devices   4 asked: none replied"])):
        write_summary(
            directory, outcome="diverged", rounds=rounds, totals={"selected": 4 * rounds}, updates_per_second=None
        )
        assert [line for line in Results.read(directory).to_text().splitlines() if "asked" in line] == told


def test_results_give_what_a_notebook_wants(write_row: Write, write_summary: Write) -> None:
    directory = claim(EXPERIMENT, None)
    write_row(directory, 1)
    write_summary(directory)
    results = Results.read(directory)
    assert results.accuracy == 0.875
    assert [row.round for row in results.rows] == [1]
    assert results.model == directory / "model.safetensors"


def test_the_end_of_a_run_is_told_in_a_few_lines_for_people_and_whole_for_programs(write_summary: Write) -> None:
    directory = claim(EXPERIMENT, None)
    with RunDirectory(directory) as run:
        for round in (1, 2):
            run.metrics(Row(round=round, accuracy=round / 4, accepted=5, round_seconds=0.25))
    write_summary(directory, perturbed=True)
    results = Results.read(directory)
    lines = [
        "tiny: completed, 3 rounds in 4.2 s (2.0 h of the experiment's time)",
        "  accuracy  87.5 %  (best 90.0 %)",
        "  devices   12 asked: 9 accepted, 2 cancelled, 1 dropped; 20 updates/s",
        "  perturbed: a device was given up or lost its own state, unplanned, so the same run may end otherwise",
        f"  model     {directory / 'model.safetensors'}  sha256 abababababababab",
    ]
    assert results.to_text().splitlines() == lines
    results.report.touch()
    assert results.to_text().splitlines() == [*lines, f"  report    {directory / 'report.html'}"]
    assert json.loads(results.to_json()) == {"directory": str(directory), **results.summary}
    assert (results.accuracy_of_last(2), results.accuracy_of_last(3)) == (0.375, None)


def test_a_doubt_is_one_of_the_last_lines(write_summary: Write) -> None:
    directory = claim(EXPERIMENT, None)
    with RunDirectory(directory) as run:
        run.metrics(Row(round=1, accuracy=0.1, test_samples=360))
    write_summary(directory, final_accuracy=0.1, chance_accuracy=0.1)
    (line,) = [line for line in Results.read(directory).to_text().splitlines() if line.startswith("  doubt")]
    assert line.startswith("  doubt     the model has learnt nothing: with an accuracy of 10.0 %")
