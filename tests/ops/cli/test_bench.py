"""``fedemu bench``: which subjects it measures, and how it shows them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedemu.ops.bench.growth.curve import Curve, Point
from fedemu.ops.bench.growth.growth import Growth
from fedemu.ops.bench.growth.plot import draw
from fedemu.ops.bench.measuring.measure import Effort, Figure, Sample, Tell, cost, rate
from fedemu.ops.bench.measuring.worker import BenchmarkError
from fedemu.ops.bench.subjects import Wishes
from fedemu.ops.cli import bench
from fedemu.ops.cli.commands import app
from fedemu.protocol.errors import ConfigurationError

efforts: list[Effort] = []


def toy(effort: Effort, tell: Tell) -> Iterator[Figure]:
    efforts.append(effort)
    tell("toy: measuring")
    yield rate("toy", "messages", "messages/s", [(Sample(4.0, 2.0, 2.0), Sample(4.0, 1.0, 1.0))], reach=0.6)
    yield cost("toy", "memory", "MB", [5.0], [2.5], limit=8.0)


@pytest.fixture(autouse=True)
def _only_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    efforts.clear()
    monkeypatch.setattr(bench, "SUBJECTS", {"toy": toy, "other": lambda effort, tell: iter(())})


def test_figures_are_shown_with_what_was_wanted() -> None:
    result = CliRunner().invoke(app, ["bench", "toy"])
    assert result.exit_code == 0
    assert "toy: measuring ..." in result.stderr
    text = " ".join(result.stdout.split())
    assert "messages messages/s 2 4 0.5 0.5-0.5 0.5 missed 0.6 or more" in text
    assert "memory MB 5 2.5 2 2-2 reached 8 MB or less" in text


def test_json_has_the_machine_and_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "SUBJECTS", {"fleet": toy})  # it has a large form
    result = CliRunner().invoke(app, ["bench", "--quick", "--large", "--format", "json"])
    said = json.loads(result.stdout)
    assert (said["quick"], said["complete"]) == (True, True)
    assert said["machine"]["cores"] >= 1
    assert "torch" in said["versions"]
    assert [(figure["subject"], figure["name"], figure["met"]) for figure in said["figures"]] == [
        ("toy", "messages", False),
        ("toy", "memory", True),
    ]
    assert (efforts[0].scale, efforts[0].large) == (0.1, True)


def test_an_unknown_subject_is_refused_before_anything_is_measured() -> None:
    result = CliRunner().invoke(app, ["bench", "toy", "nonsense"])
    assert result.exit_code == 2
    assert "there is no benchmark 'nonsense'; choose from toy, other" in result.stderr
    assert efforts == []


def test_a_study_whose_files_the_disk_does_not_take_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files_end_at: Any
) -> None:
    def grow(effort: Effort, wishes: Wishes, tell: Tell) -> Iterator[Growth]:
        curve = Curve("devices", ("10", "20"), (Point(10, 1.0, 1.0), Point(20, 1.0, 2.0)))
        yield Growth((curve,), tmp_path)
        draw([curve], tmp_path)

    monkeypatch.setattr(bench, "STUDIES", {"growth": grow})
    with files_end_at(100):
        result = CliRunner().invoke(app, ["bench", "growth", "--plots", str(tmp_path)])
    assert result.exit_code == 5
    assert "slope 1.00, last slope 1.00; wanted 1.1 or less: reached" in " ".join(result.stdout.split())
    assert " ".join(result.stderr.split()).endswith("growth.png cannot be written: File too large")
    assert [*tmp_path.iterdir()] == []


def test_what_was_measured_before_an_error_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(effort: Effort, tell: Tell) -> Iterator[Figure]:
        yield from toy(effort, tell)
        raise BenchmarkError("the child ended")

    monkeypatch.setattr(bench, "SUBJECTS", {"failing": failing})
    result = CliRunner().invoke(app, ["bench", "failing"])
    assert result.exit_code == 5
    assert "memory MB 5 2.5 2" in " ".join(result.stdout.split())
    assert result.stderr.endswith("fedemu: the child ended\n")


def test_a_study_that_is_interrupted_is_shown_as_far_as_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(effort: Effort, wishes: Wishes, tell: Tell) -> Iterator[Growth]:
        points = tuple(Point(size, 1.0, 1.0) for size in (10, 20, 30))
        for count in (2, 3):
            yield Growth((Curve("devices", ("10", "20", "30")[:count], points[:count]),))
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "STUDIES", {"growth": interrupted})
    result = CliRunner().invoke(app, ["bench", "toy", "growth", "--format", "json"])
    assert result.exit_code == 4
    assert "slope 0.00, last slope 0.00" in result.stderr
    said = json.loads(result.stdout)
    assert said["complete"] is False
    assert [figure["name"] for figure in said["figures"]] == ["messages", "memory"]
    assert [point["size"] for point in said["growth"]["curves"][0]["points"]] == [10, 20, 30]


def test_a_refused_study_prints_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(effort: Effort, wishes: Wishes, tell: Tell) -> Iterator[Growth]:
        raise ConfigurationError("no GPU here")
        yield

    monkeypatch.setattr(bench, "STUDIES", {"gpu": refused})
    result = CliRunner().invoke(app, ["bench", "gpu", "--format", "json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith("fedemu: no GPU here\n")
