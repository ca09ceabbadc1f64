"""A run's page and plots, drawn from what its directory holds."""

import json
from pathlib import Path

import pytest

from fedemu.coordinator.record.row import Row
from fedemu.ops.report import figures
from fedemu.ops.report.plots import rounds
from fedemu.ops.report.plots.diagnosis import DIAGNOSIS_PLOTS
from fedemu.ops.report.report import write_report
from fedemu.protocol.errors import ConfigurationError

ROW = {
    "task": 0,
    "loss": 1.5,
    "class_accuracy": [0.5, None],
    "selected": 4,
    "accepted": 3,
    "dropped": 1,
    "online": 7,
    "bytes_down": 1000,
    "bytes_up": 2000,
    "round_seconds": 0.5,
}


def rows(count: int) -> list[dict[str, object]]:
    return [
        ROW
        | {
            "round": n,
            "accuracy": n / 10,
            "class_accuracy": [0.5 / n, None],
            "round_forgetting": 0.1 if n > 1 else None,
            "consistency": 0.9,
            "virtual_time": 60.0 * n,
        }
        for n in range(1, count + 1)
    ]


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text('name = "a <b>"\n')
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(3)))
    (tmp_path / "events.jsonl").write_text(json.dumps({"event": "dropout", "virtual_time": 1.0}) + "\n")
    return tmp_path


def test_the_page_of_an_unfinished_run_holds_its_plots_and_numbers(run_directory: Path) -> None:
    page = write_report(run_directory).read_text()
    assert "unfinished" in page
    assert "<b>30.0 %</b>" in page
    assert "<b>33.3 %</b>" in page, "the only known class fell from 50 % to a third of that"
    assert '>dropped</button></td><td class="number">3</td><td class="number">25.0\N{NO-BREAK SPACE}%</td>' in page
    assert '<td class="words">dropout</td><td class="number">1</td>' in page
    assert page.count("<svg") == len(rounds.PLOTS)
    assert {path.stem for path in (run_directory / "plots").iterdir()} == set(rounds.PLOTS)
    assert "Diagnosed rounds" not in page


def test_the_page_of_a_run_that_learnt_nothing_says_so(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PLOTS", {})
    (run_directory / "summary.json").write_text(json.dumps({"outcome": "completed", "chance_accuracy": 0.31}))
    learnt = [row | {"test_samples": 1000} for row in rows(3)]
    (run_directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in learnt))
    page = write_report(run_directory).read_text()
    assert '<p class="bad">The model has learnt nothing: with an accuracy of 30.0 %' in page


def test_a_diagnosed_run_has_the_papers_pictures_too(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PLOTS", {})
    model = {"loss": 1.0, "class_accuracy": [0.5, None]}
    diagnosed = {
        "round": 2,
        "devices": [7],
        "before": model,
        "after": model,
        "locals": {"loss": [2.0], "class_accuracy": [[0.25, None]], "in_local": [0.5], "out_local": [None]},
        "round_forgetting": 0.0,
        "alignment": {"features": {"locals": [0.5], "after": 1.0}, "logits": {"locals": [0.5], "after": None}},
        "validation": {"forgetting": [[0.25]], "mean_forgetting": 0.0},
    }
    nowhere = {key: value for key, value in diagnosed.items() if key != "round"}
    (run_directory / "diagnosis.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (diagnosed, nowhere)))
    page = write_report(run_directory).read_text()
    assert "Diagnosed rounds" in page
    assert page.count("<svg") == len(DIAGNOSIS_PLOTS)


def test_lines_that_lack_what_a_picture_needs_are_not_drawn(run_directory: Path) -> None:
    for log in ("metrics", "diagnosis"):
        (run_directory / f"{log}.jsonl").write_text('{}\n{"loss": 1.0}\n{"round": 1}\n{"round": 2, "online": 3}\n')
    page = write_report(run_directory).read_text()
    assert "<svg" not in page
    assert "Diagnosed rounds" not in page


def test_remarks_of_ones_own_under_a_known_name_are_left_out(run_directory: Path) -> None:
    odd = {"replay": 0.5, "generator": [1.0], "coordination": "none"}
    said = [{"round": 1, "remarks": odd}, {"round": 2, "remarks": {"replay": {"kept": 3}}}]
    (run_directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    assert "<svg" not in write_report(run_directory).read_text()


def test_texts_of_a_run_are_never_taken_for_markup(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PLOTS", {})
    page = write_report(run_directory).read_text()
    assert "a &lt;b&gt;" in page
    assert "a <b>" not in page
    assert "http" not in page.replace("http-equiv", "")


def test_facts_have_units(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PLOTS", {})
    machine = {"system": "Linux", "cores": 2, "memory_bytes": 16_800_000_000}
    summary = {"wall_time": 200.5, "virtual_time": 7200.0, "seed": 3, "machine": machine}
    (run_directory / "summary.json").write_text(json.dumps(summary))
    page = write_report(run_directory).read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert '>wall time</button></td><td class="words">3 min 20 s</td>' in page
    assert '>virtual time</button></td><td class="words">2.0 h</td>' in page
    assert '<td class="words">machine</td><td class="words">system Linux, cores 2, memory 16.8 GB</td>' in page
    assert "<dt>seed</dt>\n<dd>3</dd>" in page


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_plot_without_data_is_left_out() -> None:
    bare = [Row(1, virtual_time=0.0)]
    assert [name for name, draw in rounds.PLOTS.items() if draw(bare) is not None] == []
