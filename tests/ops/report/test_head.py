"""The head of a run's page, and what of the page anybody can check: it stands alone, and each id is its own."""

from __future__ import annotations

import html.parser
import json

import pytest

from fedemu.ops.experiment.presets import preset
from fedemu.ops.experiment.sources import load_experiment, write_frozen
from fedemu.ops.report.report import write_report


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with two tasks of two rounds, of which three rounds are done, and with two classes."""
    path = tmp_path_factory.mktemp("run")
    overrides = ["rounds=4", "stream.tasks=2", "stream.rounds_per_task=2"]
    assert preset("digits-tasks")
    write_frozen(load_experiment("digits-tasks", overrides, {})[0], path)
    rows = [
        {
            "round": n,
            "task": (n - 1) // 2,
            "accuracy": 0.5 + n / 100,
            "loss": 1.0,
            "class_accuracy": [0.5, 0.6],
            "period_accuracy": [0.5, 0.6],
            "period_loss": [1.0, 1.0],
            "seen_accuracy": 0.5,
            "seen_loss": 1.0,
            "selected": 2,
            "accepted": 2,
            "virtual_time": 1.0 * n,
            "online": 2,
            "remarks": {"replay": {"period": 0, "devices": 2, "samples": 4, "periods": [4, 0]}} if n == 2 else {},
        }
        for n in (1, 2, 3)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"outcome": "interrupted", "seed": 1, "ended": "2026-03-01T12:30:00+00:00", "model_digest": "d" * 64}
    (path / "summary.json").write_text(json.dumps(summary))
    return write_report(path).read_text()


class Page(html.parser.HTMLParser):
    """What a page holds: its ids, what it refers to, its scripts, and its facts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name == "popovertarget":
                self.targets.append(value or "")
            elif name in ("href", "src", "data", "poster"):
                self.references.append(value or "")


def test_the_page_stands_alone(text: str) -> None:
    page = Page(text)
    assert "http" not in text
    assert all(address.startswith(("#", "data:image/png;base64,")) for address in page.references)
    assert not {"script", "link", "iframe"} & {*page.tags}
    assert len(page.ids) == len(set(page.ids))
    assert page.targets
    assert {*page.targets} <= {*page.ids}
    assert {address[1:] for address in page.references if address[0] == "#"} <= {*page.ids}


def test_the_head_has_the_facts_of_the_run(text: str) -> None:
    for name, value in (
        ("method", "fedavg"),
        ("data", "digits, Dirichlet alpha 1"),
        ("stream", "classes: 2 tasks of 2 rounds"),
        ("model", "mlp hidden [64]"),
        ("devices", "10, of which 5 take part in a round"),
        ("rounds", "3 of 4"),
        ("seed", "1"),
        ("date", "2026-03-01 12:30 UTC"),
        (
            "run again",
            "<code>fedemu run digits-tasks --rounds 4 --set stream.tasks=2 --set stream.rounds_per_task=2</code>",
        ),
        ("model digest", f"<code>{'d' * 64}</code>"),
    ):
        assert f"<dt>{name}</dt>\n<dd>{value}</dd>" in text
    assert "</i>devices: accepted</span>" in text
    assert "</i>periods, from the first to the last</span>" in text


def test_people_count_periods_from_1_and_read_shares_in_percent(text: str) -> None:
    text = text.replace("\N{NO-BREAK SPACE}", " ")
    table = text[text.index("<h2>By period</h2>") :]
    assert '<tr><td class="words">1</td><td class="number">2</td><td class="number">50.0 %</td>' in table
    assert "<b>53.0 %</b>" in text
    assert "±" not in text
