"""The head of a comparison's page: what its experiments have in common, and which colour each of them has."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from fedemu.ops.compare.compare import Comparison
from fedemu.ops.pages.head import Fact, Swatch
from fedemu.ops.pages.style import ACCURACY_COLOURS, LINE_STYLES, PALETTE, tones
from fedemu.ops.results.words import date_of, settings_in_words

_LINES: Final[Sequence[Literal["solid", "dashed", "dotted"]]] = ("solid", "dashed", "dotted", "dashed")
_MOST_VALUES = 6
"""Of a fact with more values than this, only their number is told."""


def head(comparison: Comparison, out: Path) -> list[Fact]:
    """The facts of all experiments. Where they differ in one, it has all their values."""
    told = [settings_in_words(entry.experiment) for entry in comparison.entries if entry.experiment]
    names = list(dict.fromkeys(name for settings in told for name in settings))
    facts = [(name, _all([settings.get(name, "none") for settings in told])) for name in names]
    runs = [run for entry in comparison.entries for run in entry.runs]
    rounds = [f"{len(run.rows):,}" for run in runs]
    seeds = [str(seed) for entry in comparison.entries for seed in entry.seeds if seed is not None]
    differ = " (not all in each experiment)" if comparison.seeds_differ else ""
    dates = sorted(date for run in runs if (date := date_of(run)))
    span = dates[:1] if dates[:1] == dates[-1:] else [dates[0], dates[-1]]
    facts += [
        ("rounds", _all(rounds)),
        ("seeds" if len(set(seeds)) > 1 else "seed", ", ".join(sorted(set(seeds), key=int)) + differ),
        ("date", " to ".join(span)),
    ]
    again = shlex.join([*comparison.command, "--out", str(out)]) if comparison.command else ""
    return [
        *(Fact(name, value) for name, value in facts if value),
        *([Fact("make again", again, "code")] if again else []),
    ]


def swatches(comparison: Comparison) -> list[Swatch]:
    """The colour and the line of each experiment, and the colours of maps."""
    own = [
        Swatch((PALETTE[place % len(PALETTE)],), entry.label, _LINES[place // len(PALETTE) % len(LINE_STYLES)])
        for entry in comparison.entries
        for place in [entry.place]
    ]
    return [*own, Swatch(tones(ACCURACY_COLOURS), "maps: accuracy from 0 to 100 %")]


def _all(values: Sequence[str]) -> str:
    """The values, each once."""
    different = list(dict.fromkeys(values))
    return " | ".join(different) if len(different) <= _MOST_VALUES else f"{len(different)} different ones"
