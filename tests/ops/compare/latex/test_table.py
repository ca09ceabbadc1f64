"""The table for LaTeX, and the paired tests that it tells."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.record.run import Run
from fedemu.ops.compare.beside import beside_best
from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.entry import FIGURES, Entry, Statistic
from fedemu.ops.compare.latex.column import escaped
from fedemu.ops.compare.latex.table import latex
from fedemu.ops.compare.paired import best_of, least_wilcoxon, paired_tests
from fedemu.ops.compare.text import explanation
from fedemu.protocol.errors import ConfigurationError

GOOD = (0.91, 0.93, 0.95, 0.92)
POOR = (0.81, 0.82, 0.86, 0.8)
NEAR = (0.9, 0.94, 0.94, 0.92)


def entry(label: str, accuracies: tuple[float | None, ...], **figures: tuple[float | None, ...]) -> Entry:
    none = Statistic((None,) * len(accuracies))
    given = {key: Statistic(values) for key, values in {"final_accuracy": accuracies, **figures}.items()}
    runs = tuple(Run(Path(f"{label}-{n}"), "", [], [], {}) for n in range(len(accuracies)))
    return Entry(label, runs, tuple(range(len(runs))), dict.fromkeys(FIGURES, none) | given)


def signed_rank_of(counts: Sequence[int]) -> float | None:
    """The p-value of the signed-rank test where accuracies differ by these counts of 1,000 samples."""
    base = [0.5] * len(counts)
    other = [0.5 + count / 1000 for count in counts]
    return paired_tests([entry("base", (*base,)), entry("other", (*other,))], "final_accuracy")[0].wilcoxon


def comparison(*entries: Entry) -> Comparison:
    return Comparison(entries, None, (), command=("fedemu", "compare", "runs/a_b"))


def rows(table: str) -> list[list[str]]:
    """The cells of the table, read as LaTeX reads them: braces in balance, no character left special."""
    body = "\n".join(line.replace(r"\$", "dollar") for line in table.splitlines() if not line.startswith("%"))
    assert body.count("{") - body.count("\\{") == body.count("}") - body.count("\\}")
    assert body.count("$") % 2 == 0
    inside = body.split(r"\midrule")[0].split(r"\toprule")[1] + body.split(r"\midrule")[1].split(r"\bottomrule")[0]
    lines = [line.strip().removesuffix(r"\\").strip() for line in inside.splitlines() if line.strip()]
    cells = [re.split(r"(?<!\\)&", line) for line in lines]
    cells = [[cell.strip().replace("dollar", r"\$") for cell in line] for line in cells]
    (form,) = re.findall(r"\\begin\{tabular\}\{(\w+)\}", body)
    assert {len(line) for line in cells} == {len(form)}
    return cells


def test_a_mean_over_some_of_the_seeds_says_over_how_many_and_the_caption_explains_it() -> None:
    some, none = (0.91, None, 0.95, None), (None,) * 4
    table = latex(comparison(entry("some", some), entry("none", none)))
    assert [line[2] for line in rows(table)[1:]] == [r"$93.0 \pm 2.8\ (2)$", "--"]
    told = "In parentheses: the number of seeds that have a value, where some have none."
    assert told in table
    assert told not in latex(comparison(entry("good", GOOD), entry("none", none)))


def test_what_does_not_compare_is_told_in_comments_above_the_table() -> None:
    table = latex(replace(comparison(entry("good", GOOD)), warnings=("the runs differ in rounds (8, 4)", "two\nlines")))
    above, _ = table.split(r"\begin{table}")
    assert above.splitlines()[-2:] == ["% the runs differ in rounds (8, 4)", "% two lines"]


def test_rows_of_different_seeds_are_told() -> None:
    told = "The rows have different seeds."
    assert told in latex(comparison(entry("three", GOOD[:3]), entry("four", POOR)))
    assert told in latex(comparison(entry("0", GOOD[:1]), replace(entry("1", POOR[:1]), seeds=(1,))))
    assert told not in latex(comparison(entry("good", GOOD), entry("poor", POOR)))
    assert explanation(comparison(entry("three", GOOD[:3]), entry("four", POOR)))[1] == "the rows have different seeds"


def test_the_best_mean_is_that_of_completed_runs_if_some_are() -> None:
    def ended(each: Entry, outcome: str) -> Entry:
        return replace(each, runs=tuple(replace(run, summary={"outcome": outcome}) for run in each.runs))

    good, poor = ended(entry("good", GOOD), "completed"), entry("poor", POOR)
    for outcome, told in (("quorum", " among completed runs"), ("completed", "")):
        assert f"The best mean of each column{told} is bold." in latex(comparison(good, ended(poor, outcome)))


def test_the_best_mean_is_bold_and_one_that_is_not_clearly_worse_has_a_dagger() -> None:
    table = latex(comparison(entry("good", GOOD), entry("poor", POOR), entry("near", NEAR)))
    assert rows(table) == [
        ["Experiment", "Seeds", r"Final accuracy (\%) $\uparrow$"],
        ["good", "4", r"$\mathbf{92.8} \pm 1.7$"],
        ["poor", "4", r"$82.2 \pm 2.6$"],
        ["near", "4", r"$92.5 \pm 1.9^{\dagger}$"],
    ]
    assert (
        r"\caption{Mean $\pm$ sample standard deviation over the seeds. The best mean of each column is bold." in table
    )
    assert "paired t-test over 4 shared seeds" in table
    assert "% fedemu compare runs/a_b --latex" in table


def test_what_was_not_tested_has_a_mark_of_its_own() -> None:
    table = latex(comparison(entry("good", GOOD), entry("poor", POOR), entry("short", (0.6, None, None, None))))
    assert [line[2] for line in rows(table)[2:]] == [r"$82.2 \pm 2.6$", r"$60.0^{\ddagger}\ (1)$"]
    assert r"$\ddagger$: not tested against it.}" in table
    assert "dagger" not in latex(comparison(entry("good", GOOD[:1]), entry("poor", POOR[:1]))), "there are no tests"


def test_lower_is_better_for_forgetting_equal_means_are_both_bold_and_a_value_alone_is_not() -> None:
    one = entry("one", (0.5,), forgetting=(0.25,), consistency=(0.9,))
    two = entry("two", (0.5,), forgetting=(0.125,))
    assert rows(latex(comparison(one, two))) == [
        [
            "Experiment",
            "Seeds",
            r"Final accuracy (\%) $\uparrow$",
            r"Forgetting (\%) $\downarrow$",
            r"Consistency $\uparrow$",
        ],
        ["one", "1", r"$\mathbf{50.0}$", "$25.0$", "$0.900$"],
        ["two", "1", r"$\mathbf{50.0}$", r"$\mathbf{12.5}$", "--"],
    ]
    assert r"\caption{One run each." in latex(comparison(one, two))


def test_columns_are_chosen_by_their_titles() -> None:
    one = entry("one", (0.5,), best_accuracy=(0.75,), forgetting=(0.25,))
    assert "% fedemu compare runs/a_b --latex --columns best,forgetting" in latex(
        comparison(one), ["best", "forgetting"]
    )
    assert rows(latex(comparison(one), ["best", "forgetting"]))[1] == [
        "one",
        "1",
        "$75.0$",
        "$25.0$",
    ]
    words = entry("words", (0.5,), last_accuracy=(0.25,), all_period_perplexity=(80.0,))
    assert [line[2:] for line in rows(latex(comparison(words), ["perplexity", "last 100"]))] == [
        [r"Perplexity $\downarrow$", r"Last 100 (\%) $\uparrow$"],
        ["$80.0$", "$25.0$"],
    ]
    with pytest.raises(ConfigurationError, match='no column "forgeting"; did you mean forgetting'):
        latex(comparison(one), ["forgeting"])
    with pytest.raises(ConfigurationError, match="there are final accuracy, best, forgetting"):
        latex(comparison(one), ["perplexity"])


def with_measures(one: Entry, **measures: Sequence[float | None]) -> Entry:
    """An entry whose devices measured these values, one for each run, in its first round of two."""
    told = ({name: of_runs[n] for name, of_runs in measures.items()} for n in range(len(one.runs)))
    rounds = ((Row(round=1, device_metrics=values), Row(round=2)) for values in told)
    return replace(one, runs=tuple(replace(run, rows=rows) for run, rows in zip(one.runs, rounds, strict=True)))


def test_own_measures_are_columns_which_are_tested_if_it_is_said_which_values_are_better() -> None:
    good = with_measures(entry("good", GOOD), norm=POOR, tiny=(2e-5, 4e-5, 3e-5, 3e-5))
    poor = with_measures(entry("poor", POOR), norm=GOOD, tiny=(None, None, None, 1e-6))
    own = [f"device_metrics.{name}" for name in ("norm:lower", "norm", "tiny")]
    table = latex(comparison(good, poor), own)
    assert rows(table) == [
        [
            "Experiment",
            "Seeds",
            r"device\_metrics.norm $\downarrow$",
            r"device\_metrics.norm",
            r"device\_metrics.tiny ($10^{-5}$)",
        ],
        ["good", "4", r"$\mathbf{0.823} \pm 0.026$", r"$0.823 \pm 0.026$", r"$3.00 \pm 0.82$"],
        ["poor", "4", r"$0.927 \pm 0.017$", r"$0.927 \pm 0.017$", r"$0.10\ (1)$"],
    ]
    assert "The best mean of each column with an arrow is bold." in table
    (test,) = [line for line in table.splitlines() if line.startswith("% device_metrics.norm: ")]
    differences = np.subtract(GOOD, POOR)
    p = float(scipy.stats.ttest_1samp(differences, 0.0).pvalue)
    told = f"poor minus good: {differences.mean():+.4g} over 4 pairs, paired t p = {p:.3g}, after Holm {p:.3g}"
    assert test.startswith(f"% device_metrics.norm: {told}")
    assert "bold" not in latex(comparison(good, poor), own[1:])


@pytest.mark.parametrize(
    ("title", "hint"),
    [
        ("forgetting:lower", 'leave out ":lower", which only measures of your own take'),
        ("device_metrics.distance:down", 'which values are better is said by ":higher" or ":lower"'),
        ("device_metrics.distnce:lower", "did you mean device_metrics.distance:lower?"),
        ("device_metrics.distnce", "did you mean device_metrics.distance?"),
        ("forgeting:lower", "did you mean forgetting?"),
        ("nothing:lower", "there are final accuracy, forgetting, device_metrics.distance"),
    ],
)
def test_the_error_for_a_title_that_is_no_column_says_what_to_write(title: str, hint: str) -> None:
    one = with_measures(entry("one", (0.5,), forgetting=(0.25,)), distance=(1.0,))
    with pytest.raises(ConfigurationError, match=f'^the table has no column "{title}"; {re.escape(hint)}$'):
        latex(comparison(one), [title])


def test_more_than_five_columns_may_be_too_wide_and_the_caption_tells_seeds_where_a_row_has_several() -> None:
    five = dict.fromkeys(("forgetting", "round_forgetting", "consistency", "average_accuracy"), (0.5,))
    assert "too wide" not in latex(comparison(entry("one", (0.5,), **five)))
    wide = latex(comparison(entry("one", (0.5,), **five, average_forgetting=(0.5,)), entry("two", (0.5, 0.25))))
    assert "% 6 columns may be too wide; choose some with --columns" in wide
    assert r"\caption{Mean $\pm$ sample standard deviation over the seeds." in wide


def test_names_cannot_break_the_table() -> None:
    name = r"a_b & 50 % of #1 {x} ~ ^2 $5 <b> | \end"
    (_, line) = rows(latex(comparison(entry(name, (0.5,)))))
    first, second = (
        r"a\_b \& 50 \% of \#1 \{x\} \textasciitilde{} \textasciicircum{}2 \$5 ",
        r"\textless{}b\textgreater{} \textbar{} \textbackslash{}end",
    )
    assert line[0] == first + second
    assert escaped("±") == "±"
    options = [
        line[0] for line in rows(latex(comparison(*(entry(name, (0.5,)) for name in ("[2] a", " *b", "c [3]*")))))
    ]
    assert options[1:] == ["{}[2] a", "{} *b", "c [3]*"]


def test_the_best_entry_is_found_at_any_place_and_the_first_of_equals_is_the_best() -> None:
    good, poor = (entry(name, values, forgetting=values) for name, values in (("good", GOOD), ("poor", POOR)))
    assert [best_of(pair, "final_accuracy") for pair in ([good, poor], [poor, good], [good, good])] == [0, 1, 0]
    assert [best_of(pair, "forgetting") for pair in ([good, poor], [poor, good], [good, good])] == [1, 0, 0]


def test_pairs_are_runs_of_the_same_seed_and_p_values_are_those_of_scipy() -> None:
    good, poor = entry("good", GOOD), entry("poor", (*POOR, 0.9))
    (test,) = paired_tests([good, poor], "final_accuracy")
    assert (test.label, test.best, test.pairs) == ("poor", "good", 4)
    assert test.difference == pytest.approx(np.mean(np.subtract(POOR, GOOD)))
    assert test.t == pytest.approx(scipy.stats.ttest_rel(POOR, GOOD).pvalue)
    assert test.wilcoxon == pytest.approx(0.125)
    assert test.adjusted == test.t
    assert "Wilcoxon p = 0.125 (never below 0.125 with so few pairs)" in latex(comparison(good, poor))
    six = latex(comparison(entry("good", (*GOOD, 0.9, 0.91)), entry("poor", (*POOR, 0.83, 0.8))))
    assert "Wilcoxon p = 0.0312" in six
    assert "never below" not in six
    forgot = [entry("good", GOOD, forgetting=(0.1,) * 4), entry("poor", POOR, forgetting=(0.3, 0.2, 0.4, 0.5))]
    (test,) = paired_tests(forgot, "forgetting")
    assert (test.label, test.difference, test.wilcoxon) == ("poor", pytest.approx(0.25), 0.125)


@pytest.mark.parametrize("counts", [(3, 1, -2, 5, 4, 6), (1, 2, 3, 4, 5, 6, 7, 8, 9, -10, 11, 12, 13, 14)])
def test_without_ties_the_signed_rank_test_is_that_of_scipy(counts: Sequence[int]) -> None:
    assert signed_rank_of(counts) == pytest.approx(scipy.stats.wilcoxon(counts, method="exact").pvalue)


@pytest.mark.parametrize(
    "counts", [(1, 1, 1, 1, -1), (2, 2, -1, 3, 0, -2), (1, -1, 1, -1, 2, 2, 3), (4, 4, 0, 0, -1), (1, 1, -2, 3, 3)]
)
def test_with_ties_and_zeros_the_signed_rank_test_counts_all_signs(counts: Sequence[int]) -> None:
    signed = np.array([count for count in counts if count])
    ranks = scipy.stats.rankdata(np.abs(signed))
    sums = [ranks[np.array(signs)].sum() for signs in itertools.product((False, True), repeat=len(signed))]
    reached = ranks[signed > 0].sum()
    tail = min(np.mean([each <= reached for each in sums]), np.mean([each >= reached for each in sums]))
    assert signed_rank_of(counts) == pytest.approx(min(1.0, 2 * tail))


@pytest.mark.parametrize("scale", [1.0, 1e9 / 3])
def test_differences_that_only_the_rounding_of_floats_tells_apart_are_ties(scale: float) -> None:
    good = tuple(scale * each for each in (0.814, 0.948, 0.86, 0.709, 0.921, 0.911))
    poor = tuple(scale * each for each in (0.81, 0.95, 0.863, 0.705, 0.924, 0.91))
    (test,) = paired_tests([entry("good", good), entry("poor", poor)], "final_accuracy")
    assert test.wilcoxon == signed_rank_of((4, -2, -3, 4, -3, 1))


def test_small_differences_of_shares_that_only_the_rounding_of_floats_tells_apart_are_ties() -> None:
    good, counts = (0.814, 0.948, 0.86, 0.709, 0.921, 0.911), (4, -2, -3, 4, -3, 1)
    near = tuple(each - count / 1e6 for each, count in zip(good, counts, strict=True))
    (test,) = paired_tests([entry("good", good), entry("near", near)], "final_accuracy")
    assert test.wilcoxon == signed_rank_of(counts)


def test_small_differences_of_large_values_that_only_the_rounding_of_floats_tells_apart_are_ties() -> None:
    good, poor = (0.814, 0.948, 0.86, 0.709, 0.921, 0.911), (0.81, 0.952, 0.856, 0.713, 0.918, 0.91)
    high, low = (tuple(1e8 + each for each in values) for values in (good, poor))
    (test,) = paired_tests([entry("good", high), entry("poor", low)], "final_accuracy")
    assert test.wilcoxon == signed_rank_of((4, -4, 4, -4, 3, 1))
    more = tuple(1e8 + (each + 0.1) for each in good)
    (test,) = paired_tests([entry("good", high), entry("more", more)], "final_accuracy")
    assert (test.difference, test.t, test.wilcoxon) == (pytest.approx(-0.1), None, None)


@pytest.mark.parametrize("scale", [1e-13, 1e-200, 1e200])
def test_own_measures_of_any_size_are_tested_as_they_are(scale: float) -> None:
    high, low = (2.1, 2.0, 2.4, 1.9, 2.2, 2.0), (1.0, 1.1, 1.2, 0.9, 1.1, 1.3)
    ones = [entry(name, GOOD + NEAR[:2], norm=of_runs) for name, of_runs in (("high", high), ("low", low))]
    scaled = [
        entry(one.label, GOOD + NEAR[:2], norm=tuple(scale * value for value in one.figures["norm"].known))
        for one in ones
    ]
    (test,) = paired_tests(scaled, "norm", "lower")
    assert test.t == pytest.approx(scipy.stats.ttest_rel(high, low).pvalue)
    assert (test.label, test.best, test.wilcoxon) == ("high", "low", 0.03125)
    none = [entry(name, GOOD, norm=(0.0,) * 4) for name in ("one", "two")]
    assert [(test.t, test.wilcoxon) for test in paired_tests(none, "norm", "lower")] == [(None, None)]


def test_figures_near_zero_that_only_the_rounding_of_floats_tells_apart_are_not_tested() -> None:
    lost = ((0.0, 0.1 - (0.3 - 0.2), 0.0), (0.0, 0.0, 0.7 - 0.6 - 0.1))
    one, two = (entry(name, GOOD[:3], forgetting=of_runs) for name, of_runs in zip(("one", "two"), lost, strict=True))
    (test,) = paired_tests([one, two], "forgetting")
    assert (test.t, test.wilcoxon, abs(test.difference) < 1e-16) == (None, None, True)


def test_thirteen_seeds_with_ties_are_tested_at_once() -> None:
    began = time.process_time()
    assert signed_rank_of([1, -1, 2, 2, 1, -1, 2, 2, 1, -1, 2, 2, 3]) == 0.01171875
    assert time.process_time() - began < 1.0, "going through all signs takes seconds"


def test_holms_correction_multiplies_the_smallest_p_value_most() -> None:
    good, others = entry("good", GOOD), [entry("poor", POOR), entry("near", NEAR)]
    poor, near = paired_tests([good, *others], "final_accuracy")
    assert poor.t is not None
    assert poor.adjusted == pytest.approx(2 * poor.t)
    assert near.adjusted == near.t
    assert paired_tests([good, *others[::-1]], "final_accuracy") == [near, poor]
    alike = tuple(value + change for value, change in zip(GOOD, (0.01, -0.01, 0.01, -0.011), strict=True))
    tests = paired_tests([good, entry("one", alike), entry("two", alike)], "final_accuracy")
    assert [test.adjusted for test in tests] == [1.0, 1.0]


def test_an_experiment_with_a_run_that_was_cut_short_is_not_the_best_and_that_run_is_not_tested() -> None:
    """Its forgetting is the least, because it had only two rounds to forget."""

    def after(rounds: Sequence[int], one: Entry) -> Entry:
        ends = ({"outcome": "completed" if count == 9 else "diverged"} for count in rounds)
        played = (tuple(Row(round=number + 1) for number in range(count)) for count in rounds)
        runs = (replace(run, rows=rows, summary=end) for run, rows, end in zip(one.runs, played, ends, strict=True))
        return replace(one, runs=tuple(runs))

    whole = after([9, 9, 9, 9], entry("whole", GOOD, forgetting=(0.3, 0.2, 0.25, 0.2)))
    short = after([2, 9, 9, 9], entry("short", GOOD, forgetting=(0.0, 0.25, 0.28, 0.3)))
    (test,) = paired_tests([short, whole], "forgetting")
    assert (test.label, test.best, test.pairs) == ("short", "whole", 3)
    assert best_of([short], "forgetting") == 0
    last = after([9, 9, 9, 2], entry("last", GOOD, forgetting=(0.25, 0.28, 0.3, 0.0)))
    assert [test.pairs for test in paired_tests([whole, last], "forgetting")] == [3], "whichever run is the short one"


def test_the_terminals_table_sets_each_experiment_beside_the_best_of_each_figure() -> None:
    entries = [
        entry("good", GOOD, forgetting=(0.3, 0.3, 0.2, 0.3)),
        entry("poor", POOR, forgetting=(0.1, 0.2, 0.1, 0.2)),
    ]
    told = beside_best(entries)
    assert told is not None
    assert (
        told[0] == "difference to the best in percentage points, over 4 shared seeds, and p of a paired t-test (Holm)"
    )
    p = scipy.stats.ttest_rel(POOR, GOOD).pvalue
    assert told[1]["final accuracy"] == ["best", f"-10.5, p {p:.3f}" if p >= 0.001 else "-10.5, p < 0.001"]
    assert told[1]["forgetting"][1] == "best"
    assert beside_best([entry("good", GOOD[:1]), entry("poor", POOR[:1])]) is None, "one seed is no test"
    told = beside_best([entry("one", GOOD), entry("same", GOOD)])
    assert told is not None, "a tie is a result, too"
    assert told[1]["final accuracy"] == ["best", "+0.0 in each seed"]
    others = [
        entry("far", (0.11, 0.13, 0.15, 0.1201)),
        entry("short", (0.61, None, None, None)),
        replace(entry("apart", POOR), seeds=(7, 8, 9, 10)),
    ]
    told = beside_best([entries[0], *others])
    assert told is not None
    assert "over 1 to 4 shared seeds" in told[0]
    assert told[1]["final accuracy"] == ["best", "-80.0, p < 0.001", "-30.0", "–"]


def test_two_pairs_are_enough_for_a_test() -> None:
    (test,) = paired_tests([entry("good", GOOD[:2]), entry("poor", POOR[:2])], "final_accuracy")
    assert (test.t, test.wilcoxon) == (pytest.approx(scipy.stats.ttest_rel(POOR[:2], GOOD[:2]).pvalue), 0.5)


def test_what_cannot_be_tested_is_not_and_says_why() -> None:
    good = entry("good", (0.9, 0.8))
    assert paired_tests([good, entry("same", (0.8, 0.7))], "final_accuracy")[0].t is None
    assert "all pairs differ equally" in latex(comparison(good, entry("same", (0.8, 0.7))))
    assert "one pair is too few" in latex(comparison(good, entry("short", (0.5, None))))
    assert paired_tests([good], "forgetting") == []
    assert paired_tests([good, replace(entry("others", (0.5, 0.6)), seeds=(7, None))], "final_accuracy") == []
    nameless = [replace(each, seeds=(None, None)) for each in (good, entry("poor", (0.5, 0.6)))]
    assert paired_tests(nameless, "final_accuracy") == []
    assert [least_wilcoxon(pairs) for pairs in (3, 5, 6)] == [0.25, 0.0625, 0.03125]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="there is no pdflatex on this machine")
def test_latex_takes_the_table(tmp_path: Path) -> None:
    table = latex(comparison(entry(r"a_b & 5 % \x", GOOD), entry("[near]", NEAR), entry("*far", POOR)))
    text = rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{table}" + "\n\\end{document}\n"
    (tmp_path / "paper.tex").write_text(text)
    done = subprocess.run(["pdflatex", "-halt-on-error", "paper"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-2000:]


def test_experiments_that_are_tested_with_other_samples_are_not_tested_against_each_other() -> None:
    good, poor, other = entry("good", GOOD), entry("poor", POOR), entry("other", POOR)
    digits, mnist = ({"data": {"dataset": name, "test_fraction": 0.2}} for name in ("digits", "mnist"))
    entries = [replace(good, experiment=digits), replace(poor, experiment=digits), replace(other, experiment=mnist)]
    assert [test.label for test in paired_tests(entries, "final_accuracy")] == ["poor"]


def test_what_classes_lost_from_test_to_test_is_tested_only_at_the_same_interval() -> None:
    good, poor = entry("good", GOOD, round_forgetting=POOR), entry("poor", POOR, round_forgetting=GOOD)
    often, seldom = ({"evaluate": {"every": every, "samples": 0, "full_every": 10}} for every in (1, 5))
    entries = [replace(good, experiment=often), replace(poor, experiment=seldom)]
    assert [test.label for test in paired_tests(entries, "final_accuracy")] == ["poor"]
    assert paired_tests(entries, "round_forgetting") == []
    alike = [replace(each, experiment=seldom) for each in entries]
    assert [test.label for test in paired_tests(alike, "round_forgetting")] == ["poor"]
