"""A run as one self-contained page: the facts, the plots, the events and the configuration."""

from __future__ import annotations

import base64
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fedemu.coordinator.record.run_directory import Run, read_generated, read_run
from fedemu.ops.figures import readable_bytes, span, time_unit
from fedemu.ops.pages.style import rendered
from fedemu.ops.report.generated import GENERATOR_TABLE, generated_plots, generator_table, missing_pictures
from fedemu.ops.report.periods import TABLE_HEADER, period_cards, period_table
from fedemu.ops.report.plots.diagnosis import DIAGNOSIS_PLOTS
from fedemu.ops.report.plots.generated import is_broad
from fedemu.ops.report.plots.periods import PERIOD_PLOTS
from fedemu.ops.report.plots.replay import REPLAY_PLOTS
from fedemu.ops.report.plots.rounds import PLOTS
from fedemu.ops.results.periods import PeriodResults, period_results

CSS = """
:root { --ink: #22303c; --soft: #66737f; --line: #e3e8ec; --blue: #2f6fb2; }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--ink);
  margin: 0; background: #f5f7f9 }
main { max-width: 1240px; margin: 0 auto; padding: 28px 24px 60px }
h1 { font-size: 26px; margin: 0 0 2px } h2 { font-size: 17px; margin: 34px 0 10px }
.sub { color: var(--soft); margin: 0 0 20px }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px }
.card { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 12px 14px }
.card b { display: block; font-size: 20px; font-weight: 650; letter-spacing: -.01em; white-space: nowrap }
.card span { color: var(--soft); font-size: 13px }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 16px;
  align-items: start }
.plots img { width: 100%; background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 8px }
.plots.broad { grid-template-columns: 1fr }
table { border-collapse: collapse; background: #fff; border: 1px solid var(--line); border-radius: 10px }
td, th { padding: 5px 14px; text-align: left; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums }
td.n { text-align: right }
pre { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: 14px;
  overflow: auto; font-size: 13px }
summary { cursor: pointer; font-weight: 600; margin-top: 26px }
.bad { color: #c8443f } code { font-size: 13px; overflow-wrap: anywhere }
@media (max-width: 560px) { .plots { grid-template-columns: 1fr } }
"""


def write_report(directory: Path) -> Path:
    """Draw ``plots/*.png`` and ``report.html`` from what the run directory holds, also of an unfinished run.

    Raises ConfigurationError where the directory holds no run.
    """
    run = read_run(directory)
    rows, results, pages = _of_rounds(run.rows), period_results(run), read_generated(directory)
    plots = directory / "plots"
    plots.mkdir(exist_ok=True)
    sections = {
        "Periods": draw_all(PERIOD_PLOTS, results, plots) if results else {},
        "Replay": draw_all(REPLAY_PLOTS, rows, plots),
        "Plots": draw_all(PLOTS, rows, plots),
        "Diagnosed rounds": draw_all(DIAGNOSIS_PLOTS, _of_rounds(run.diagnosis), plots),
    }
    images = draw_all(generated_plots(pages), pages, plots)
    generated = _generated(run, images, any(map(is_broad, pages.values())))
    page = directory / "report.html"
    replace_text(page, _page(directory.name, run, results, sections, generated))
    return page


def draw_all(plots: Mapping[str, Callable[[Any], Figure | None]], data: Any, folder: Path) -> dict[str, bytes]:
    """Draw every plot for which there is data as a PNG, keep it in ``folder``, and return it by its name."""
    drawn = {name: rendered(draw, data) for name, draw in plots.items()}
    images = {name: image for name, image in drawn.items() if image is not None}
    for name, image in images.items():
        (folder / f"{name}.png").write_bytes(image)
    return images


def embedded(images: Mapping[str, bytes]) -> str:
    """The pictures as elements of a page that needs no other file."""
    return "".join(
        f'<img alt="{escape(name)}" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
        for name, image in images.items()
    )


def replace_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_suffix(".tmp")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _page(
    name: str, run: Run, results: PeriodResults | None, sections: Mapping[str, Mapping[str, bytes]], generated: str
) -> str:
    """``sections`` are the pictures by their heading; one without a picture is left out. ``generated`` is a section."""
    summary = run.summary or {}
    title = str(summary.get("name") or name)
    outcome = str(summary.get("outcome") or "unfinished")
    perturbed = " · <span class=bad>perturbed</span>" if summary.get("perturbed") else ""
    pictures = "".join(
        f'<h2>{heading}</h2><div class="plots">{embedded(images)}</div>'
        for heading, images in sections.items()
        if images
    )
    periods = f"<h2>By period</h2>{_table(period_table(results), TABLE_HEADER)}" if results else ""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} · fedemu</title><style>{CSS}</style></head><body><main>
<h1>{escape(title)}</h1>
<p class="sub">outcome <b>{escape(outcome)}</b>{perturbed} · run directory <code>{escape(name)}</code></p>
<div class="cards">{_cards(run.rows, summary, results)}</div>
{pictures or "<h2>Plots</h2><p>No round has finished yet.</p>"}
{periods}
{generated}
<h2>Outcomes of selected devices</h2>{_table(_outcome_rows(run.rows), ("outcome", "devices", "share"))}
<h2>Events</h2>{_table(_event_rows(run.events), ("event", "count"))}
<h2>Facts</h2>{_table(_facts(summary), ("fact", "value"))}
<details><summary>Configuration</summary><pre>{escape(run.config)}</pre></details>
</main></body></html>
"""


def _generated(run: Run, images: Mapping[str, bytes], broad: bool) -> str:
    """The section of generators, with pictures of the width of the page if ``broad``; empty where there are none."""
    table, missing = generator_table(run.rows), missing_pictures(run.events)
    if not (images or table or missing):
        return ""
    sentences = "".join(f'<p class="bad">{escape(sentence)}</p>' for sentence in missing)
    pictures = f'<div class="plots{" broad" if broad else ""}">{embedded(images)}</div>' if images else ""
    told = f"<p>{escape(GENERATOR_TABLE)}</p>{_table(table[1:], table[0])}" if table else ""
    return f"<h2>Generated samples</h2>{sentences}{pictures}{told}"


def _of_rounds(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The rows that tell their round; no other can be drawn."""
    return [row for row in rows if row.get("round") is not None]


def _cards(rows: Iterable[Mapping[str, Any]], summary: Mapping[str, Any], results: PeriodResults | None) -> str:
    rows = list(rows)
    accuracies = [row["accuracy"] for row in rows if row.get("accuracy") is not None]
    last = rows[-1] if rows else {}
    virtual = float(last.get("virtual_time") or 0.0)
    divisor, unit = time_unit(virtual)
    accepted = sum(int(row.get("accepted") or 0) for row in rows)
    seconds = sum(float(row.get("round_seconds") or 0.0) for row in rows)
    facts = [
        *(period_cards(results) if results else []),
        ("final accuracy", f"{accuracies[-1]:.1%}" if accuracies else "–"),
        ("best accuracy", f"{max(accuracies):.1%}" if accuracies else "–"),
        *([] if results else [("forgetting", _number(summary.get("forgetting")))]),
        ("rounds", f"{len(rows)}"),
        ("device updates accepted", f"{accepted:,}"),
        ("updates per second", _rate(accepted / seconds) if seconds else "–"),
        ("time of the experiment", f"{virtual / divisor:.1f} {unit}"),
        ("bytes down, emulated", readable_bytes(sum(float(row.get("bytes_down") or 0) for row in rows))),
        ("bytes up, emulated", readable_bytes(sum(float(row.get("bytes_up") or 0) for row in rows))),
    ]
    return "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for label, value in facts
    )


def _outcome_rows(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    totals: Counter[str] = Counter()
    for row in rows:
        for outcome in ("accepted", "cancelled", "late", "dropped", "failed", "rejected"):
            totals[outcome] += int(row.get(outcome) or 0)
    selected = sum(totals.values())
    return [(name, f"{count:,}", f"{count / selected:.1%}" if selected else "–") for name, count in totals.items()]


def _event_rows(events: Iterable[Mapping[str, Any]]) -> list[tuple[str, str]]:
    counts = Counter(str(event.get("event", "?")) for event in events)
    return [(name, f"{count:,}") for name, count in counts.most_common()]


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    for key in ("seed", "model_digest", "wall_time", "virtual_time", "versions", "machine"):
        value = summary.get(key)
        if value is not None:
            facts.append((key.replace("_", " "), _fact(key, value)))
    return facts


def _fact(key: str, value: Any) -> str:
    """A value of the summary as people read it, with its unit."""
    match value:
        case Mapping():
            return ", ".join(f"{name.removesuffix('_bytes')} {_fact(name, item)}" for name, item in value.items())
        case int() | float() if key.endswith("_bytes"):
            return readable_bytes(value)
        case int() | float() if key.endswith("_time"):
            return span(value)
    return str(value)


def _table(rows: Iterable[tuple[str, ...]], header: tuple[str, ...]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    return f"<table><tr>{head}</tr>{''.join(map(_line, rows))}</table>"


def _line(row: tuple[str, ...]) -> str:
    """A table row; short values stand to the right, as numbers do."""
    first, *rest = row
    cells = [f"<td>{escape(first)}</td>"]
    cells += [f'<td class="{"n" if len(cell) < 24 else ""}">{escape(cell)}</td>' for cell in rest]
    return f"<tr>{''.join(cells)}</tr>"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _number(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) else "–"
