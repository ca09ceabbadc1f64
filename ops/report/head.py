"""The head of a run's page: what was run, when, how to run it again, and what the colours mean."""

from __future__ import annotations

from fedemu.coordinator.record.run import Run
from fedemu.ops.pages.colours import BLUE, GREY, ORANGE, RED
from fedemu.ops.pages.head import Fact, Swatch
from fedemu.ops.pages.style import ACCURACY_COLOURS, ORDERED, tones
from fedemu.ops.report.plots.rounds import OUTCOME_COLOURS
from fedemu.ops.results.words import command_again, date_of, settings_in_words, table_of


def head(run: Run) -> list[Fact]:
    """The facts of a run, finished or not. What its files do not tell is left out."""
    summary = run.summary
    table = table_of(run)
    seed = summary.get("seed", table.get("seed"))
    told = [
        *settings_in_words(table).items(),
        ("rounds", _rounds(len(run.rows), table.get("rounds"))),
        ("seed", "" if seed is None else str(seed)),
        ("date", date_of(run)),
    ]
    again = [
        ("run again", command_again(table, run.path) if table else ""),
        ("model digest", str(summary.get("model_digest") or "")),
    ]
    return [
        *(Fact(name, value) for name, value in told if value),
        *(Fact(name, value, "code") for name, value in again if value),
    ]


def swatches(run: Run, several_periods: bool) -> list[Swatch]:
    """What the colours of the plots mean."""
    found: list[Swatch] = []
    if any(row.accuracy is not None for row in run.rows):
        found += [
            Swatch((BLUE,), "accuracy, and the global model"),
            Swatch((ORANGE,), "loss, and what devices send or train"),
            Swatch((RED,), "forgetting"),
            Swatch(tones(ACCURACY_COLOURS), "maps: accuracy from 0 to 100 %"),
        ]
    if several_periods:
        found.append(Swatch(tones(ORDERED), "periods, from the first to the last"))
    ended = [name for name in OUTCOME_COLOURS if any(row.outcomes[name] for row in run.rows)]
    found += [Swatch((OUTCOME_COLOURS[name],), f"devices: {name}") for name in ended]
    if run.diagnosis:
        found.append(Swatch((GREY,), "the old global model"))
    return found


def _rounds(finished: int, wanted: int | None) -> str:
    return f"{finished:,}" if wanted in (None, finished) else f"{finished:,} of {wanted:,}"
