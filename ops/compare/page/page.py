"""Writes a comparison to a folder: a self-contained page, its pictures, and the numbers for other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.page.experiments import COMPARISON_PLOTS, WIDE_COMPARISON_PLOTS
from fedemu.ops.compare.page.replay import REPLAY_PLOTS, WIDE_REPLAY_PLOTS
from fedemu.ops.compare.page.tasks import WIDE_TASK_PLOTS
from fedemu.ops.compare.text import TO_THE_LEFT, columns, explanation, replay_tables, task_table
from fedemu.ops.report.report import CSS, draw_all, embedded, replace_text
from fedemu.protocol.errors import ConfigurationError

NUMBERS, PAGE = "compare.json", "compare.html"
_CSS = """
main { max-width: 1500px } .wide + .sub { margin-top: 8px } .wide { overflow-x: auto; font-size: 13px }
.wide td, .wide th { padding: 5px } .wide th { vertical-align: bottom } th.n { text-align: right }
.wide td:first-child { font-weight: 600; min-width: 130px }
.one img { max-width: 100%; background: #fff;
  border: 1px solid var(--line); border-radius: 10px; padding: 8px }
"""


def claim_folder(out: Path) -> None:
    """Make ``out`` ready; ConfigurationError where it holds anything but an earlier comparison."""
    try:
        if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / NUMBERS).is_file())):
            raise ConfigurationError(f"{out} exists and holds no comparison; choose another folder with --out")
        (out / "plots").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"can't write to {out}: {error.strerror}; choose another folder with --out") from error


def write_comparison(comparison: Comparison, out: Path) -> Path:
    """Write ``compare.html``, ``compare.json`` and ``plots/*.png`` into a folder that ``claim_folder`` made ready."""
    for stale in (*COMPARISON_PLOTS, *WIDE_COMPARISON_PLOTS, *REPLAY_PLOTS, *WIDE_REPLAY_PLOTS, *WIDE_TASK_PLOTS):
        (out / "plots" / f"{stale}.png").unlink(missing_ok=True)
    tasks = _pictures({}, draw_all(WIDE_TASK_PLOTS, comparison.tasks, out / "plots"))
    replay = _pictures(
        *(draw_all(plots, comparison.replay, out / "plots") for plots in (REPLAY_PLOTS, WIDE_REPLAY_PLOTS))
    )
    pictures = _pictures(
        *(draw_all(plots, comparison, out / "plots") for plots in (COMPARISON_PLOTS, WIDE_COMPARISON_PLOTS))
    )
    replace_text(out / NUMBERS, json.dumps(comparison.table(), indent=2, allow_nan=False) + "\n")
    page = out / PAGE
    replace_text(page, _page(comparison, tasks, replay, pictures or "<p>No run has an evaluated round yet.</p>"))
    return page


def _pictures(images: Mapping[str, bytes], wide: Mapping[str, bytes]) -> str:
    """Side by side, and below them those that need the width of the page; empty where there are none."""
    both = f'<div class="plots">{embedded(images)}</div><p class="one">{embedded(wide)}</p>'
    return both if images or wide else ""


def _page(comparison: Comparison, tasks: str, replay: str, pictures: str) -> str:
    runs = sum(len(entry.runs) for entry in comparison.entries)
    warnings = "".join(f'<p class="bad">{escape(warning)}</p>' for warning in comparison.warnings)
    notes = "; ".join(explanation(comparison))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>comparison · fedemu</title><style>{CSS}{_CSS}</style></head><body><main>
<h1>Comparison</h1>
<p class="sub">{len(comparison.entries)} experiments, {runs} runs</p>
{warnings}
<div class="wide">{_table(columns(comparison))}</div><p class="sub">{escape(notes)}</p>
{_section("Tasks", tasks, [task_table(study) for study in comparison.tasks])}
{_section("Replay", replay, [table for study in comparison.replay for table in replay_tables(study)])}
<h2>Plots</h2>{pictures}
<h2>Runs</h2>{_runs(comparison)}
</main></body></html>
"""


def _section(heading: str, pictures: str, tables: Sequence[tuple[str, Mapping[str, list[str]]]]) -> str:
    """Empty without tables."""
    told = "".join(f'<p>{escape(title)}</p><div class="wide">{_table(table)}</div>' for title, table in tables)
    return f"<h2>{heading}</h2>{pictures}{told}" if told else ""


def _table(table: Mapping[str, list[str]]) -> str:
    to_the_right = ["" if title in TO_THE_LEFT else " class=n" for title in table]
    head = "".join(f"<th{side}>{escape(title)}</th>" for title, side in zip(table, to_the_right, strict=True))
    lines = (
        "".join(f"<td{side}>{_cell(cell)}</td>" for cell, side in zip(row, to_the_right, strict=True))
        for row in zip(*table.values(), strict=True)
    )
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def _cell(text: str) -> str:
    """Lines end only after a comma and before a deviation or a bracket, so that no number loses its unit or name."""
    kept = escape(text).replace(" ", "&nbsp;")
    for parted in ("&nbsp;±", "&nbsp;(", ",&nbsp;"):
        kept = kept.replace(parted, parted.replace("&nbsp;", " "))
    return kept


def _runs(comparison: Comparison) -> str:
    lines = [
        f"<tr><td>{escape(row['label'])}</td><td class=n>{'–' if run['seed'] is None else run['seed']}</td>"
        f"<td class=n>{run['rounds']}</td><td>{escape(run['outcome'])}</td>"
        f"<td><code>{escape(run['directory'])}</code></td></tr>"
        for row in comparison.table()["rows"]
        for run in row["runs"]
    ]
    head = "".join(f"<th>{title}</th>" for title in ("experiment", "seed", "rounds", "outcome", "directory"))
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>'
