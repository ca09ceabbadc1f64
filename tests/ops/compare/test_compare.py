"""A comparison: which runs belong together, how they are called, and the numbers of the table."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.ops.cli import commands
from fedemu.ops.compare.compare import Comparison, compare
from fedemu.ops.compare.curves import MOVED, class_table, curve, spent
from fedemu.ops.compare.entry import Statistic
from fedemu.ops.compare.page.experiments import COMPARISON_PLOTS, WIDE_COMPARISON_PLOTS
from fedemu.ops.compare.page.page import claim_folder, write_comparison
from fedemu.ops.compare.paired import best_of, paired_tests
from fedemu.ops.compare.text import columns, text
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import write_frozen
from fedemu.ops.pages.style import drawn, saved
from fedemu.protocol.errors import ConfigurationError

PLOTS = {**COMPARISON_PLOTS, **WIDE_COMPARISON_PLOTS}


def write_run(
    directory: Path, accuracies: Sequence[float | None], *, outcome: str | None = "completed", **settings: Any
) -> Path:
    """Write a run of two classes. The first class has the accuracy of the round, the second one half."""
    directory.mkdir(parents=True)
    write_frozen(Experiment.parse({"name": directory.name, **settings}), directory)
    rows = [
        {
            "round": round,
            "accuracy": accuracy,
            "class_accuracy": None if accuracy is None else [accuracy, 0.5],
            "round_forgetting": None if round == 1 else 0.25 * round,
            "bytes_down": 1500,
            "bytes_up": 500,
            "virtual_time": 60.0 * round,
            "wall_time": 2.0 * round,
        }
        for round, accuracy in enumerate(accuracies, 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if outcome is not None:
        (directory / "summary.json").write_text(json.dumps({"outcome": outcome}))
    return directory


@pytest.fixture
def seeds(tmp_path: Path) -> Path:
    """A group of two seeds."""
    write_run(tmp_path / "group" / "seed-0", [0.25, 0.5, 0.75, 0.5], seed=0)
    write_run(tmp_path / "group" / "seed-1", [0.25, 0.25, 0.5, 0.25], seed=1)
    return tmp_path / "group"


def labels(comparison: Comparison) -> list[str]:
    return [entry.label for entry in comparison.entries]


def test_seeds_of_one_experiment_are_one_row_of_means_and_sample_deviations(seeds: Path) -> None:
    comparison = compare([seeds])
    (entry,) = comparison.entries
    assert entry.label == "fedavg"
    assert entry.seeds == (0, 1)
    assert entry.outcome == "completed"
    assert entry.figures["final_accuracy"] == Statistic((0.5, 0.25))
    assert entry.figures["final_accuracy"].mean == 0.375
    assert entry.figures["final_accuracy"].deviation == pytest.approx(0.25 / 2**0.5)
    assert entry.figures["best_accuracy"].values == (0.75, 0.5)
    # The first class lost 0.25 against its best, the second nothing.
    assert entry.figures["forgetting"].values == (0.125, 0.125)
    assert entry.figures["round_forgetting"].values == (0.75, 0.75)
    assert entry.figures["bytes_down"].values == (6000.0, 6000.0)
    assert entry.figures["bytes_up"].values == (2000.0, 2000.0)
    assert entry.figures["virtual_time"].values == (240.0, 240.0)
    assert entry.figures["wall_time"].values == (8.0, 8.0)


def test_a_comparison_holds_no_events_and_still_refuses_a_run_whose_events_are_damaged(seeds: Path) -> None:
    log = seeds / "seed-1" / "events.jsonl"
    log.write_text('{"event": "crash"}\n' * 3)
    assert [run.events for entry in compare([seeds]).entries for run in entry.runs] == [(), ()]
    log.write_text('{"event"\n' * 3)
    with pytest.raises(ConfigurationError, match=re.escape(str(log))):
        compare([seeds])


def test_rounds_are_counted_to_shares_of_the_first_rows_best_accuracy(seeds: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "prox", [0.4, 0.6], algorithm={"name": "fedprox"})
    comparison = compare([seeds, other])
    assert comparison.target == 0.625
    first, second = comparison.entries
    assert [first.figures[f"rounds_to_{share}"].values for share in (50, 75, 95)] == [(2, 3), (2, 3), (3, None)]
    assert [second.figures[f"rounds_to_{share}"].values for share in (50, 75, 95)] == [(1,), (2,), (2,)]


def test_the_mean_accuracy_of_the_last_rounds_is_given_where_a_run_has_so_many(seeds: Path) -> None:
    assert compare([seeds]).entries[0].figures["last_accuracy"].values == (None, None)
    assert "last 100" not in columns(compare([seeds]))
    comparison = compare([seeds], last=2)
    assert comparison.entries[0].figures["last_accuracy"].values == (0.625, 0.375)
    assert columns(comparison)["last 2"] == ["50.0 ± 17.7 %"]
    assert comparison.table()["last"] == 2


def test_the_page_on_the_run_directory_tells_every_key_of_a_comparison(seeds: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "other" / "seed-0", [0.5], seed=0, local={"lr": 0.5})
    table = compare([seeds, tmp_path / "other"]).table()
    page = (Path(__file__).parents[3] / "docs" / "run_directory.md").read_text(encoding="utf-8")
    told = {*re.findall(r"`(\w+)`", page.split("## Groups of seeds, and comparisons")[1])}
    assert table["tests"]
    keys = {*table, *(key for part in ("rows", "tests") for one in table[part] for key in one)}
    assert keys - told == set()


def test_a_metric_that_a_device_has_named_by_control_characters_is_one_line_for_a_terminal(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.5])
    row = json.loads((run / "metrics.jsonl").read_text())
    (run / "metrics.jsonl").write_text(json.dumps({**row, "device_metrics": {"m\x1b[31m\n\n!": 1.0}}) + "\n")
    said = text(compare([run]), 200)
    assert "device_metrics.m [31m  !" in said
    assert "\x1b" not in said


def test_last_models_that_were_not_tested_are_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "early", [0.5, None, 0.6, None], outcome="quorum", seed=0)
    write_run(tmp_path / "whole", [0.5, None, 0.6, None], seed=1)
    assert compare([tmp_path]).warnings == (
        f"the last models of some runs were not tested: their final accuracies are those after round 3 of 4 in {run}",
    )


def test_seeds_that_were_tested_in_other_rounds_are_told(tmp_path: Path) -> None:
    grown = write_run(tmp_path / "grown", [None, 0.4, 0.5, 0.6, 0.7], seed=0)
    fresh = write_run(tmp_path / "fresh", [None, 0.4, None, 0.6, 0.7], seed=1)
    assert compare([grown, fresh]).warnings == (
        f"not all seeds of one experiment were tested in round 3 ({grown}, {fresh}), so their means over rounds and "
        "their rounds to a target do not compare",
    )
    begun = [write_run(tmp_path / "begun", [], seed=2, outcome=None), fresh]
    assert not any("were tested in" in warning for warning in compare(begun).warnings)
    timed = {"stream": {"kind": "drift", "periods": 3, "period_seconds": 60.0}}
    clocked = [
        write_run(tmp_path / f"{seed}", accuracies, seed=seed, **timed)
        for seed, accuracies in enumerate(([None, 0.4, 0.5, 0.6], [None, 0.4, None, 0.6]))
    ]
    assert compare(clocked).warnings == (), "their periods end in other rounds"


def test_a_target_that_is_given_counts_for_every_row(seeds: Path) -> None:
    comparison = compare([seeds], 0.5)
    figures = comparison.entries[0].figures
    assert [figures[f"rounds_to_{share}"].values for share in (50, 75, 95)] == [(1, 1), (2, 3), (2, 3)]


def test_an_accuracy_that_is_reached_exactly_counts_whatever_its_last_bit(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [0.3])
    assert compare([run], 0.4).entries[0].figures["rounds_to_75"].values == (1,)


def test_runs_that_differ_in_name_seed_or_what_is_measured_of_them_are_one_row(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", [0.5], seed=1),
        write_run(tmp_path / "b", [0.5], seed=2, diagnose={"every": 2}),
        write_run(tmp_path / "c", [0.5], seed=3, local={"lr": 0.5}),
    ]
    assert [entry.seeds for entry in compare(runs).entries] == [(1, 2), (3,)]


def test_rows_are_named_by_method_loss_and_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    def dirichlet(alpha: float) -> dict[str, Any]:
        return {"partition": {"kind": "dirichlet", "alpha": alpha}}

    runs = [
        write_run(tmp_path / "a", [0.5], data=dirichlet(0.1)),
        write_run(tmp_path / "b", [0.5], data=dirichlet(0.5), algorithm={"loss": "wsm"}),
        write_run(tmp_path / "c", [0.5], data=dirichlet(0.1), algorithm={"name": "x", "options": {"mu": 0.1}}),
        write_run(tmp_path / "d", [0.5], data=dirichlet(0.1), algorithm={"name": "x", "options": {"mu": 1}}),
        write_run(tmp_path / "e", [0.5], data={"partition": {"kind": "iid"}}, algorithm={"options": {"tau": 3}}),
    ]
    assert labels(compare(runs)) == [
        "fedavg, alpha 0.1",
        "fedavg + wsm, alpha 0.5",
        "x, mu 0.1, alpha 0.1",
        "x, mu 1, alpha 0.1",
        "fedavg, tau 3, partition iid",
    ]


def test_an_option_that_is_called_kind_is_one_of_the_settings_in_which_rows_differ(tmp_path: Path) -> None:
    def options(kind: str, mu: float) -> dict[str, Any]:
        return {"model": {"name": f"net{mu:g}", "kind": kind}, "algorithm": {"options": {"kind": kind, "mu": mu}}}

    runs = [write_run(tmp_path / kind, [0.5], **options(kind, mu)) for kind, mu in (("a", 1), ("b", 2))]
    assert labels(compare(runs)) == ["fedavg, kind a, mu 1, model net1", "fedavg, kind b, mu 2, model net2"]


def test_what_a_notebook_has_defined_is_named_without_the_file_that_keeps_it(tmp_path: Path) -> None:
    def cell(digest: str) -> dict[str, Any]:
        terms = {"fedemu-cells/held_0123456789ab.py:held": {"width": 2}}
        return {"name": f"fedemu-cells/half_{digest}.py:Half", "loss": "fedemu-cells/focal_45.py:focal", "terms": terms}

    runs = [
        write_run(tmp_path / "a", [0.5], algorithm=cell("1a"), model={"name": "fedemu-cells/net_12.py:Net"}),
        write_run(tmp_path / "b", [0.5], algorithm=cell("1a"), model={"name": "cells/net_12.py:Net"}),
        write_run(tmp_path / "c", [0.5], algorithm=cell("2b"), model={"name": "cells/net_12.py:Net"}),
    ]
    assert labels(compare(runs[:2])) == [
        "Half + focal + held, model Net",
        "Half + focal + held, model cells/net_12.py:Net",
    ]
    assert labels(compare(runs[1:])) == ["Half + focal + held (b)", "Half + focal + held (c)"], "two versions"


def test_rows_are_named_by_local_terms_and_by_the_options_in_which_rows_of_a_term_differ(tmp_path: Path) -> None:
    ewc, lwf = {"coefficient": 100.0}, {"coefficient": 1.0, "temperature": 2.0}
    terms: list[dict[str, Any]] = [{}, {"ewc": ewc}, {"lwf": lwf}, {"ewc": ewc, "lwf": lwf}, {"mine.py:held": {}}]
    runs = [
        write_run(tmp_path / str(number), [0.5], algorithm={"terms": of_run}) for number, of_run in enumerate(terms)
    ]
    names = ["fedavg", "fedavg + ewc", "fedavg + lwf", "fedavg + ewc + lwf", "fedavg + mine.py:held"]
    assert labels(compare(runs)) == names
    write_run(tmp_path / "5", [0.5], algorithm={"terms": {"lwf": lwf | {"temperature": 4.0}}})
    assert labels(compare([tmp_path / "2", tmp_path / "5"])) == [
        "fedavg + lwf, temperature 2",
        "fedavg + lwf, temperature 4",
    ]
    for number, (one, other) in enumerate([(1.0, 2.0), (1.0, 3.0), (5.0, 2.0)], 6):
        terms_of_run = {"ewc": {"coefficient": one}, "lwf": {"coefficient": other}}
        write_run(tmp_path / str(number), [0.5], algorithm={"terms": terms_of_run})
    assert labels(compare([tmp_path / "6", tmp_path / "7", tmp_path / "8"])) == [
        "fedavg + ewc + lwf",
        "fedavg + ewc + lwf, lwf coefficient 3",
        "fedavg + ewc + lwf, ewc coefficient 5",
    ]


def test_a_value_that_is_usual_among_the_rows_is_named_in_none_of_them(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", [0.5]),
        write_run(tmp_path / "b", [0.5], algorithm={"name": "fedprox"}),
        write_run(tmp_path / "c", [0.5], data={"validation": 0.25}, local={"lr": 0.5}),
    ]
    assert labels(compare(runs)) == ["fedavg", "fedprox", "fedavg, validation 0.25, lr 0.5"]
    write_run(tmp_path / "d", [0.5], data={"validation": 0.25})
    assert labels(compare([tmp_path])) == [
        "fedavg, validation 0",
        "fedprox, validation 0",
        "fedavg, validation 0.25, lr 0.5",
        "fedavg, validation 0.25",
    ]


def test_an_option_that_is_usual_for_its_method_is_named_only_where_it_is_another(tmp_path: Path) -> None:
    usual = {"iterations": 60, "diversity": 1.0, "image_prior": 0.001, "distillation": 0.1, "split": True}
    changed = [{}, {"diversity": 0.0}, {"image_prior": 0.0}, {"distillation": 0.0}, {"split": False}]
    stream: dict[str, Any] = {"rounds": 10, "stream": {"kind": "classes", "tasks": 5, "rounds_per_task": 2}}
    for place, options in enumerate(changed):
        write_run(tmp_path / f"mfcl-{place}", [0.5], algorithm={"name": "mfcl", "options": usual | options}, **stream)
    write_run(tmp_path / "none", [0.5], **stream)
    write_run(tmp_path / "replay", [0.5], replay={"strategy": "naive_uniform", "capacity": 9}, **stream)
    assert labels(compare([tmp_path])) == [
        "mfcl",
        "mfcl, diversity 0",
        "mfcl, image_prior 0",
        "mfcl, distillation 0",
        "mfcl, split false",
        "fedavg",
        "fedavg, naive uniform, N 9",
    ]


def test_rounds_are_named_only_where_nothing_else_tells_rows_apart(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", [0.5], rounds=1),
        write_run(tmp_path / "b", [0.5], algorithm={"name": "fedprox"}, rounds=9),
    ]
    assert labels(compare(runs)) == ["fedavg", "fedprox"]
    runs.append(write_run(tmp_path / "c", [0.5], rounds=10))
    comparison = compare(runs)
    assert labels(comparison) == ["fedavg (1 round)", "fedprox", "fedavg (10 rounds)"]
    assert comparison.warnings == (
        "the runs differ in rounds (1, 9, 10), so the figures of their last models do not compare",
    )


def test_rows_with_long_differences_are_named_by_their_folders(tmp_path: Path) -> None:
    def settings(scale: int) -> dict[str, Any]:
        local = {"epochs": scale, "batch_size": scale, "lr": scale / 100, "momentum": scale / 100}
        return {"local": local, "fleet": {"devices": 100 * scale, "deadline": 10.0 * scale}}

    write_run(tmp_path / "small" / "seed-1", [0.5], seed=1, **settings(1))
    write_run(tmp_path / "small" / "seed-2", [0.5], seed=2, **settings(1))
    write_run(tmp_path / "large", [0.5], **settings(2))
    write_run(tmp_path / "alone" / "seed-3", [0.5], seed=3, **settings(3))
    named = labels(compare([tmp_path / "small", tmp_path / "large", tmp_path / "alone"]))
    assert named == ["fedavg (small)", "fedavg (large)", "fedavg (alone)"]


def test_a_folder_or_rounds_that_rows_share_do_not_follow_their_names(tmp_path: Path) -> None:
    for scale, rounds in ((1, 5), (2, 5), (3, 9)):
        local = {"epochs": scale, "batch_size": scale, "lr": scale / 100, "momentum": scale / 100}
        for seed in (0, 1):
            folder = tmp_path / ("flat" if rounds == 5 else "other") / f"{scale}-{seed}"
            write_run(folder, [0.5], seed=seed, rounds=rounds, local=local, fleet={"devices": 100 * scale})
    flat = tmp_path / "flat"
    assert labels(compare([flat, tmp_path / "other"])) == [
        f"fedavg (flat) ({flat / '1-0'})",
        f"fedavg (flat) ({flat / '2-0'})",
        "fedavg (other)",
    ]


def test_a_run_without_a_configuration_is_a_row_of_its_own_named_by_its_folder(tmp_path: Path) -> None:
    for name in ("old", "older"):
        write_run(tmp_path / name, [0.5])
        (tmp_path / name / "config.toml").unlink()
    assert labels(compare([tmp_path])) == ["old", "older"]


def with_code(run: Path, digest: str) -> Path:
    """The run, whose model's code has this digest."""
    (run / "code.json").write_text(json.dumps({"net.py": digest}))
    return run


def with_data(run: Path, digest: str) -> Path:
    """The run, whose data set has this digest."""
    (run / "summary.json").write_text(json.dumps({"outcome": "completed", "data_digest": digest}))
    return run


def test_runs_with_other_code_are_rows_of_their_own_and_a_warning_names_it(tmp_path: Path) -> None:
    model = {"name": "net.py:net"}
    old, new = "a" * 64, "b" * 64
    begun = with_code(write_run(tmp_path / "begun", [0.25], seed=0, model=model), old)
    same = with_code(write_run(tmp_path / "same", [0.25], seed=1, model=model), old)
    mended = with_code(write_run(tmp_path / "mended", [0.5], seed=0, model=model), new)
    comparison = compare([begun, mended, same])
    assert [[run.path for run in entry.runs] for entry in comparison.entries] == [[begun, same], [mended]]
    assert len(set(labels(comparison))) == 2
    assert comparison.warnings == (
        f"the runs differ in the code of net.py (digest {old[:12]}... in {begun}, digest {new[:12]}... in {mended}), "
        "so those of one experiment are rows of their own",
    )


def test_a_run_whose_code_was_changed_while_it_went_on_is_a_row_of_its_own(tmp_path: Path) -> None:
    model = {"name": "net.py:net"}
    old, new = "a" * 64, "b" * 64
    changed = with_code(write_run(tmp_path / "changed", [0.25], seed=0, model=model), new)
    (changed / "earlier_code.json").write_text(json.dumps({"net.py": [old]}))
    whole = with_code(write_run(tmp_path / "whole", [0.5], seed=1, model=model), new)
    comparison = compare([changed, whole])
    assert [[run.path for run in entry.runs] for entry in comparison.entries] == [[changed], [whole]]
    assert comparison.warnings == (
        f"the code of net.py was changed while {changed} went on, so its figures are those of several methods",
        f"the runs differ in the code of net.py (digest {new[:12]}... after others in {changed}, "
        f"digest {new[:12]}... in {whole}), so those of one experiment are rows of their own",
    )


def test_runs_with_other_traces_are_rows_of_their_own_and_a_warning_names_them(tmp_path: Path) -> None:
    old, new, same = (write_run(tmp_path / name, [0.5], seed=seed) for seed, name in enumerate(("old", "new", "same")))
    for directory, traces in ((old, "{}"), (new, "[]"), (same, "{}")):
        (directory / "traces.json").write_text(traces)
    comparison = compare([old, new, same])
    assert [[run.path for run in entry.runs] for entry in comparison.entries] == [[old, same], [new]]
    assert comparison.warnings == (
        f"the runs differ in the content of their trace files (traces.json in {old}, {new}), "
        "so those with the same settings are rows of their own",
    )


def test_runs_with_other_data_behind_one_name_are_rows_of_their_own_and_are_not_tested(tmp_path: Path) -> None:
    old, new = "a" * 64, "b" * 64
    runs = [
        with_data(write_run(tmp_path / name, [0.5], seed=seed, **settings), data)
        for name, seed, data, settings in (
            ("old", 0, old, {}),
            ("new", 0, new, {}),
            ("same", 1, old, {}),
            ("again", 1, new, {}),
            ("unknown", 2, "", {}),
            ("columns", 0, "c" * 64, {"data": {"id_column": "speaker"}}),
        )
    ]
    comparison = compare(runs)
    paths = [[run.path.name for run in entry.runs] for entry in comparison.entries]
    assert paths == [["old", "same", "unknown"], ["new", "again"], ["columns"]]
    assert comparison.warnings == (
        f"the runs differ in the content of their data set (digest {old[:12]}... in {runs[0]}, digest {new[:12]}... in "
        f"{runs[1]}), so their figures do not compare, and those with the same settings are rows of their own",
    )
    tested = paired_tests(comparison.entries, "final_accuracy")
    assert [test.label for test in tested] == [comparison.entries[2].label]
    alike = [with_data(write_run(tmp_path / loss, [0.5], algorithm={"loss": loss}), new) for loss in ("wsm", "er_ace")]
    comparison = compare(alike)
    assert (len(paired_tests(comparison.entries, "final_accuracy")), comparison.warnings) == (1, ())


def test_methods_on_other_data_behind_one_name_are_told_and_not_tested(tmp_path: Path) -> None:
    old, new, parted = "a" * 64, "b" * 64, {"partition": {"kind": "iid"}}
    plain = with_data(write_run(tmp_path / "plain", [0.5]), old)
    other = with_data(write_run(tmp_path / "other", [0.75], algorithm={"loss": "wsm"}, data=parted), new)
    comparison = compare([plain, other])
    assert comparison.warnings == (
        f"the runs differ in the content of their data set (digest {old[:12]}... in {plain}, digest {new[:12]}... in "
        f"{other}), so their figures do not compare, and those with the same settings are rows of their own",
    )
    assert paired_tests(comparison.entries, "final_accuracy") == []


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (({"every": 1}, {"every": 2}), "every 1 samples 0, every 2 samples 0"),
        (({"every": 1}, {"every": 1, "samples": 9}), "every 1 samples 0, every 1 samples 9"),
    ],
    ids=["in other rounds", "on other samples"],
)
def test_runs_that_were_diagnosed_otherwise_are_not_tested_by_what_was_found(
    tmp_path: Path, ways: Sequence[dict[str, int]], said: str
) -> None:
    for method, diagnose in zip(("fedavg", "fedprox"), ways, strict=True):
        run = write_run(tmp_path / method, [0.5, 0.6], algorithm={"name": method}, diagnose=diagnose)
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        found = [{"local_forgetting": 0.1 if row["round"] % diagnose["every"] == 0 else None} for row in rows]
        lines = [json.dumps(row | more) for row, more in zip(rows, found, strict=True)]
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    comparison = compare([tmp_path])
    assert comparison.warnings == (
        f"the runs differ in diagnose ({said}), so their local forgetting, aggregation forgetting and alignments "
        "do not compare",
    )
    assert [test.label for test in paired_tests(comparison.entries, "final_accuracy")] == ["fedprox"]
    assert paired_tests(comparison.entries, "local_forgetting") == []


@pytest.mark.parametrize("damage", [None, "[]", "{"])
def test_a_run_that_tells_of_no_code_goes_with_the_first_that_does(tmp_path: Path, damage: str | None) -> None:
    model = {"name": "net.py:net"}
    claimed = write_run(tmp_path / "claimed", [], outcome=None, seed=0, model=model)
    if damage is not None:
        (claimed / "code.json").write_text(damage)
    begun = with_code(write_run(tmp_path / "begun", [0.5], seed=1, model=model), "a" * 64)
    comparison = compare([claimed, begun])
    assert (comparison.entries[0].seeds, comparison.warnings) == ((0, 1), ())


def test_seeds_are_found_in_counting_order(tmp_path: Path) -> None:
    for seed in (10, 2):
        write_run(tmp_path / f"seed-{seed}", [0.5], seed=seed)
    (tmp_path / "compare").mkdir()
    assert compare([tmp_path]).entries[0].seeds == (2, 10)


def test_a_run_counts_once(seeds: Path, tmp_path: Path) -> None:
    again = write_run(tmp_path / "again", [0.9], seed=1)
    comparison = compare([seeds, seeds / "seed-0", again])
    assert comparison.entries[0].seeds == (0, 1)
    (warning,) = comparison.warnings
    assert warning == f"{again} is left out: it is the same experiment and seed as {seeds / 'seed-1'}"


@pytest.mark.parametrize("last", [0, 1, 2])
def test_the_longer_of_two_runs_of_one_experiment_and_seed_counts(tmp_path: Path, last: int) -> None:
    begun = write_run(tmp_path / "begun", [], outcome=None)
    stopped = write_run(tmp_path / "stopped", [0.25] * 3, outcome="interrupted")
    done = write_run(tmp_path / "done", [0.5, 0.75])
    runs = [begun, stopped, done]
    comparison = compare([*runs[last + 1 :], *runs[: last + 1]])
    (entry,) = comparison.entries
    assert [run.path for run in entry.runs] == [done]
    assert {warning.partition(" is left out")[0] for warning in comparison.warnings} == {str(begun), str(stopped)}
    assert (f"as {done}, which got further" in "".join(comparison.warnings)) == (last != 1)


def test_other_data_or_another_model_is_a_warning(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "a", [0.5]),
        write_run(tmp_path / "b", [0.5], data={"dataset": "mnist"}, model={"name": "cnn"}),
    ]
    comparison = compare(runs)
    assert comparison.warnings == (
        "the runs differ in data.dataset (digits, mnist), so their accuracies do not compare",
        "the runs differ in model (mlp hidden [64], cnn), so their accuracies do not compare",
    )
    assert len(comparison.entries) == 2


def test_outcomes_are_counted_and_runs_that_were_cut_short_take_part_with_a_warning(tmp_path: Path) -> None:
    for seed, outcome in enumerate(("completed", "diverged", None, "completed")):
        accuracies = [0.5, 0.6] if outcome == "completed" else [0.5]
        write_run(tmp_path / f"seed-{seed}", accuracies, seed=seed, outcome=outcome)
    comparison = compare([tmp_path])
    assert comparison.entries[0].outcome == "2 completed, 1 diverged, 1 unfinished"
    assert comparison.warnings == (
        f"the runs differ in the rounds that they got through (1 of 2 in {tmp_path / 'seed-1'}, "
        f"1 of 2 in {tmp_path / 'seed-2'}), so the figures of their last models do not compare",
    )


def with_rounds(run: Path, rounds: int) -> Path:
    """The run, which was completed with this number of rounds."""
    (run / "summary.json").write_text(json.dumps({"outcome": "completed", "rounds": rounds}))
    return run


def test_completed_runs_that_have_not_got_the_rounds_of_a_resume_are_interrupted_and_not_tested(tmp_path: Path) -> None:
    for seed in range(2):
        whole = write_run(tmp_path / f"a/seed-{seed}", [0.5, 0.6, 0.7, 0.8], seed=seed, rounds=4)
        with_rounds(whole, 4)
        ahead = write_run(tmp_path / f"b/seed-{seed}", [0.5, 0.9], seed=seed, rounds=4, algorithm={"loss": "wsm"})
        with_rounds(ahead, 2)
    comparison = compare([tmp_path / "a", tmp_path / "b"])
    assert [entry.outcome for entry in comparison.entries] == ["completed", "interrupted"]
    assert [run["outcome"] for run in comparison.table()["rows"][1]["runs"]] == ["interrupted", "interrupted"]
    assert comparison.warnings == (
        f"the runs differ in the rounds that they got through (2 of 4 in {tmp_path}/b/seed-0, 2 of 4 in "
        f"{tmp_path}/b/seed-1), so the figures of their last models do not compare",
    )
    assert best_of(comparison.entries, "final_accuracy") == 0
    assert paired_tests(comparison.entries, "final_accuracy") == []


def test_a_completed_run_that_has_not_got_the_rounds_of_a_resume_gives_way_to_a_twin_that_got_further(
    tmp_path: Path,
) -> None:
    old = with_rounds(write_run(tmp_path / "old", [0.1] * 4, rounds=8), 4)
    new = write_run(tmp_path / "new", [0.1] * 7, rounds=8, outcome="interrupted")
    comparison = compare([old, new])
    assert [run.path for run in comparison.entries[0].runs] == [new]
    assert comparison.warnings == (
        f"{old} is left out: it is the same experiment and seed as {new}, which got further",
    )


def test_a_run_before_its_first_evaluation_has_dashes_and_sets_no_target(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", [None]), write_run(tmp_path / "b", [0.8], local={"lr": 0.5})]
    comparison = compare(runs)
    assert comparison.target == 0.8
    assert columns(comparison)["final accuracy"] == ["–", "80.0 %"]
    assert compare(runs[:1]).target is None


def test_the_folder_of_a_sweep_is_compared_as_its_experiments_are(tmp_path: Path) -> None:
    for rate in (0.1, 0.2):
        for seed, outcome in enumerate(("completed", None)):
            folder = tmp_path / f"lr={rate}" / f"seed-{seed}"
            write_run(folder, [0.5 + rate], seed=seed, outcome=outcome, local={"lr": rate})
    (tmp_path / "compare" / "plots").mkdir(parents=True)
    whole, parts = compare([tmp_path]), compare([tmp_path / "lr=0.1", tmp_path / "lr=0.2"])
    assert [entry.outcome for entry in whole.entries] == 2 * ["1 completed, 1 unfinished"]
    assert columns(whole) == columns(parts)


def test_a_folder_with_single_runs_and_groups_of_seeds_is_compared_as_a_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "digits-1", [0.75])
    for seed in (1, 2):
        write_run(tmp_path / "digits-seeds-1" / f"seed-{seed}", [0.5], seed=seed, algorithm={"name": "fedprox"})
    entries = compare([tmp_path]).entries
    assert [(entry.label, entry.seeds) for entry in entries] == [("fedavg", (1,)), ("fedprox", (1, 2))]


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds neither a run nor a group of runs"):
        compare([tmp_path])
    with pytest.raises(ConfigurationError, match="is no folder"):
        compare([tmp_path / "absent"])


def test_the_table_shows_mean_deviation_and_how_many_seeds_got_there(seeds: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "prox", [0.5, 0.25], algorithm={"name": "fedprox"}, outcome="diverged")
    assert columns(compare([seeds, other], 0.75)) == {
        "experiment": ["fedavg", "fedprox"],
        "runs": ["2", "1"],
        "final accuracy": ["37.5 ± 17.7 %", "25.0 %"],
        "best": ["62.5 ± 17.7 %", "50.0 %"],
        "forgetting": ["12.5 %", "12.5 %"],
        "round forgetting": ["75.0 %", "50.0 %"],
        "to 37.5 %": ["2.5 ± 0.7", "1"],
        "to 56.2 %": ["3 (1 of 2)", "–"],
        "to 71.2 %": ["3 (1 of 2)", "–"],
        "bytes down": ["6.0 kB", "3.0 kB"],
        "bytes up": ["2.0 kB", "1.0 kB"],
        "virtual time": ["4.0 min", "120.0 s"],
        "wall time": ["8.0 s", "4.0 s"],
        "outcome": ["completed", "diverged"],
    }


def test_a_mean_over_some_of_the_seeds_says_over_how_many(tmp_path: Path) -> None:
    for seed, accuracies in enumerate(([0.5, 0.6], [0.5, 0.8], [])):
        write_run(tmp_path / f"seed-{seed}", accuracies, seed=seed, outcome="completed" if accuracies else "diverged")
    table = columns(compare([tmp_path], 0.8))
    assert table["final accuracy"] == ["70.0 ± 14.1 % (2 of 3)"]
    assert table["round forgetting"] == ["50.0 % (2 of 3)"]
    assert table["to 76.0 %"] == ["2 (1 of 3)"]
    assert table["bytes down"] == ["3.0 kB (2 of 3)"]


def test_traffic_that_no_round_tells_is_unknown_and_not_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [], outcome="completed")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"round": n, "accuracy": 0.5}) + "\n" for n in (1, 2)))
    comparison = compare([run])
    assert columns(comparison)["bytes down"] == ["–"]
    assert PLOTS["accuracy_by_bytes"](comparison) is None


def test_measures_of_diagnosed_runs_are_columns_if_one_of_the_runs_was_diagnosed(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a", [0.5]), write_run(tmp_path / "b", [0.5, 0.5], rounds=2)]
    assert not {"local forgetting", "aggregation forgetting"} & columns(compare(runs)).keys()
    lines = [{"round": 1, "local_forgetting": 0.5}, {"round": 2, "local_forgetting": 0.25}]
    (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert columns(compare(runs))["local forgetting"] == ["–", "37.5 %"]


def test_a_list_in_a_label_is_no_markup(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [0.5], local={"augment": [name]}) for name in ("crop", "flip")]
    assert "fedavg, augment [crop]" in text(compare(runs), 400)


def test_the_table_is_parted_where_the_terminal_is_narrow(seeds: Path) -> None:
    comparison = compare([seeds])
    whole, parted = text(comparison, 400).splitlines(), text(comparison, 80).splitlines()
    assert [line for line in whole if line.startswith("experiment")] == [whole[0]]
    assert sum(line.startswith("experiment") for line in parted) == 3
    assert max(map(len, parted)) <= 80
    assert "…" not in "".join(parted)
    assert parted[-1] == "rounds to a share of the target accuracy 62.5 %; – if it was never reached"


def test_a_curve_is_the_mean_over_the_seeds_that_have_the_round(tmp_path: Path) -> None:
    write_run(tmp_path / "seed-0", [None, None, 0.75, 0.5], seed=0)
    write_run(tmp_path / "seed-1", [0.25, None, 0.5], seed=1)
    (entry,) = compare([tmp_path]).entries
    rounds, mean, deviation = curve(entry, "accuracy")
    assert rounds.tolist() == [1.0, 3.0, 4.0]
    assert mean.tolist() == [0.25, 0.625, 0.5]
    assert deviation.tolist() == pytest.approx([0.0, 0.25 / 2**0.5, 0.0])
    rounds_with_classes, table = class_table(entry)
    assert rounds_with_classes == [1, 3, 4]
    assert table.tolist() == [[0.25, 0.625, 0.5], [0.5, 0.5, 0.5]]


def test_a_class_is_the_mean_over_the_seeds_that_have_samples_of_it(tmp_path: Path) -> None:
    lists: list[list[list[float | None]]] = [[[0.5, None, None], [0.25, 0.5, None]], [[0.25, 1.0, None, 0.75]]]
    for seed, of_rounds in enumerate(lists):
        run = write_run(tmp_path / f"seed-{seed}", [], seed=seed)
        rows = [{"round": round, "class_accuracy": values} for round, values in enumerate(of_rounds, 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = compare([tmp_path])
    rounds, table = class_table(comparison.entries[0])
    assert rounds == [1, 2]
    np.testing.assert_equal(table, [[0.375, 0.25], [1.0, 0.5], [np.nan, np.nan], [0.75, np.nan]])
    assert saved(drawn(WIDE_COMPARISON_PLOTS["class_accuracy"], comparison), "png")


@pytest.mark.parametrize(
    ("stream", "seen", "title"),
    [
        ({"kind": "classes", "tasks": 2}, 0.25, "fedavg, seed 3"),
        ({"kind": "classes", "tasks": 2, "order": [1, 0]}, 0.5, "fedavg"),
    ],
)
def test_where_seeds_draw_the_order_of_the_classes_their_map_is_that_of_one_seed(
    tmp_path: Path, stream: dict[str, Any], seen: float, title: str
) -> None:
    for seed, accuracy in ((3, 0.25), (4, 0.75)):
        write_run(tmp_path / "group" / f"seed-{seed}", [accuracy], seed=seed, stream=stream)
    comparison = compare([tmp_path / "group"])
    assert class_table(comparison.entries[0])[1].tolist() == [[seen], [0.5]]
    figure = WIDE_COMPARISON_PLOTS["class_accuracy"](comparison)
    assert figure is not None
    assert figure.axes[0].get_title() == title


def test_what_seeds_have_spent_never_falls_where_one_of_them_ended(tmp_path: Path) -> None:
    write_run(tmp_path / "seed-0", [0.5, 0.6, 0.7, 0.8], seed=0)
    slow = write_run(tmp_path / "seed-1", [], seed=1, outcome="diverged")
    rows = [{"round": round, "virtual_time": 600.0 * round, "bytes_down": 8000, "accuracy": 0.5} for round in (1, 2)]
    (slow / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    comparison = compare([tmp_path])
    (entry,) = comparison.entries
    assert [values.tolist() for values in spent(entry, "virtual_time")] == [[1, 2, 3, 4], [330, 660, 720, 780]]
    assert spent(entry, MOVED)[1].tolist() == [5000, 10000, 12000, 14000]
    figure = PLOTS["accuracy_by_time"](comparison)
    assert figure is not None
    assert figure.axes[0].lines[0].get_xdata().tolist() == pytest.approx([5.5, 11, 12, 13])


def test_the_command_that_compares_again_has_the_whole_target(seeds: Path) -> None:
    command = compare([seeds], target=0.123456789).command
    assert command == ("fedemu", "compare", str(seeds), "--target", "0.123456789")


def test_a_comparison_is_a_page_with_its_pictures_and_numbers_for_programs(seeds: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    claim_folder(out)
    page = write_comparison(compare([seeds]), out).read_text()
    assert page.count("<svg") == len(PLOTS)
    assert "http" not in page
    assert '<td class="number">37.5 ±\N{NO-BREAK SPACE}17.7\N{NO-BREAK SPACE}%</td>' in page
    assert '<td class="number">6.0\N{NO-BREAK SPACE}kB</td>' in page
    assert {path.stem for path in (out / "plots").iterdir()} == set(PLOTS)
    assert min(path.stat().st_size for path in (out / "plots").iterdir()) > 5000
    (row,) = json.loads((out / "compare.json").read_text())["rows"]
    assert row["final_accuracy"] == {"mean": 0.375, "deviation": pytest.approx(0.25 / 2**0.5), "values": [0.5, 0.25]}
    assert row["runs"][1] == {
        "directory": str(seeds / "seed-1"),
        "seed": 1,
        "outcome": "completed",
        "rounds": 4,
    }


def test_a_comparison_without_an_evaluated_round_has_no_plots(tmp_path: Path) -> None:
    comparison = compare([write_run(tmp_path / "run", [])])
    assert [name for name, draw in PLOTS.items() if drawn(draw, comparison) is not None] == []


def test_only_an_earlier_comparison_is_overwritten(tmp_path: Path) -> None:
    claim_folder(tmp_path / "new")
    (tmp_path / "new" / "compare.json").write_text("{}")
    claim_folder(tmp_path / "new")
    (tmp_path / "file").write_text("precious")
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(
            ConfigurationError, match="exists and holds no comparison; choose another folder with --out"
        ):
            claim_folder(taken)


def test_a_comparison_that_was_ended_while_it_was_drawn_is_made_again(
    seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    claim_folder(out)
    monkeypatch.setattr("fedemu.ops.compare.page.page._write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_comparison(compare([seeds]), out)
    (out / "compare.json.0123abcd.partial").touch()
    (out / "plots" / "part-class_accuracy.png.0123abcd.partial").touch()
    claim_folder(out)
    (out / "plots" / "holiday.png").touch()
    with pytest.raises(ConfigurationError, match="holds no comparison"):
        claim_folder(out)


def test_the_command_prints_the_table_for_people_and_everything_for_programs(
    seeds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fedemu.ops.compare.page.page.COMPARISON_PLOTS", {})
    monkeypatch.setattr("fedemu.ops.compare.page.page.WIDE_COMPARISON_PLOTS", {})
    monkeypatch.chdir(tmp_path)
    other = write_run(tmp_path / "b", [0.8], data={"dataset": "mnist"})

    def call(*arguments: str) -> tuple[int, str, list[str]]:
        with pytest.raises(SystemExit) as ended:
            commands.command(["compare", str(seeds), str(other), *arguments], prog_name="fedemu")
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err.splitlines()

    code, out, err = call("--target", "0.5")
    assert code == 0
    assert out.splitlines()[1].startswith("fedavg, dataset digits     2   37.5 ± 17.7 %  62.5 ± 17.7 %")
    assert err == [
        "fedemu: warning: the runs differ in data.dataset (digits, mnist), so their accuracies do not compare",
        "plots and numbers are in compare/compare.html",
    ]
    code, out, _ = call("--format", "json", "--out", "other")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "other" / "compare.json").read_text())
    code, out, err = call("--out", str(seeds))
    assert (code, out) == (2, "")
    assert err == [f"fedemu: {seeds} exists and holds no comparison; choose another folder with --out"]
