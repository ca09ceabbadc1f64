"""The results of one run as a notebook gets them: a card, a pandas frame, figures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from fedemu.coordinator.record.run import read_run
from fedemu.ops.experiment.read_toml import read_toml
from fedemu.ops.experiment.sources import CONFIG_FILE
from fedemu.ops.figures import decimal, percent, span
from fedemu.ops.notebook.card import card, from_here, link
from fedemu.ops.notebook.frames import Rows
from fedemu.ops.notebook.shown import show_figures
from fedemu.ops.results.doubts import doubts
from fedemu.ops.results.results import Results
from fedemu.ops.results.words import settings_in_words
from fedemu.protocol.host.paths import exists
from fedemu.protocol.wording import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LONGEST = 100
"""Characters of the longest description of a method, of data or of a model."""
_DIGITS = 16
"""The number of hexadecimal digits of a model's digest that are shown."""


@dataclass(frozen=True, repr=False)
class Result(Results):
    """The results of a run. ``rows[-1]`` is its last round, and ``rows()`` has all of them as a pandas frame.

    ``settings`` has the tables of the experiment, as ``config.toml`` holds them. ``directory`` is absolute, so the
    result stays that of its run when the working folder is another one.
    """

    rows: Rows
    settings: Mapping[str, Any]

    @classmethod
    def read(cls, directory: Path) -> Result:
        """Read a run. Raises ConfigurationError if ``directory`` holds none, or a file of it is damaged."""
        run = read_run(directory)
        settings = read_toml(directory / CONFIG_FILE) if run.config else {}
        return cls(directory.absolute(), Rows(run.rows), run.events, run.summary, run.outcome, settings)

    def figure(self, name: str) -> Figure:
        """One figure of the report as a matplotlib figure, such as ``accuracy``. The run may be unfinished.

        A notebook shows the picture if this is the last line of a cell.

        Raises ConfigurationError, which lists the names, if there is no figure of this name or the run has nothing to
        show in it.
        """
        # Importing matplotlib takes a second, for which nobody else should have to wait.
        from fedemu.ops.pages.style import saved
        from fedemu.ops.report.figures import figure

        show_figures(lambda drawn: saved(drawn, "png"))
        return figure(self.directory, name)

    @property
    def figures(self) -> list[str]:
        """The names of the figures that this run has."""
        from fedemu.ops.report.figures import figure_names

        return figure_names(self.directory)

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return str(self.settings.get("name") or self.directory.name)

    @property
    def facts(self) -> dict[str, str]:
        """What the card shows, in words. Empty where it is not known."""
        rounds = self.rows[-1].round if self.rows else 0
        planned = int(self.settings.get("rounds", rounds))
        known = [row.accuracy for row in self.rows if row.accuracy is not None]
        last = self.accuracy if self.accuracy is not None else known[-1] if known else None
        took = self.summary.get("wall_time")
        words = settings_in_words(self.settings)
        return {
            **{
                name: shorten(words.get(name, ""), _LONGEST, placeholder=" ...") for name in ("method", "data", "model")
            },
            "rounds": (f"{rounds} of " if rounds != planned else "")
            + counted(planned, "round")
            + ("" if took is None else f" in {span(took)}"),
            "accuracy": "" if last is None else f"{percent(last)}, best {percent(max(known, default=last))}",
            "perplexity": "" if self.perplexity is None else decimal(self.perplexity, 2),
            "cause": self.cause,
            "doubt": "; ".join(doubts(self.rows, self.summary)),
            "model digest": str(self.summary.get("model_digest") or "")[:_DIGITS],
            "folder": str(from_here(self.directory)),
        }

    @property
    def in_a_line(self) -> str:
        """How the run ended, in one line."""
        facts = self.facts
        told = [self.outcome, facts["rounds"], *([f"accuracy {facts['accuracy']}"] if facts["accuracy"] else [])]
        return f"{self.name}: {', '.join(told)}, in {from_here(self.directory)}"

    def __repr__(self) -> str:
        facts = {**self.facts, "report": str(from_here(self.report)) if exists(self.report) else ""}
        width = max(map(len, facts))
        lines = [f"  {name:<{width}}  {value}" for name, value in facts.items() if value]
        return "\n".join([f"{self.name}: {self.outcome}", *lines])

    def _repr_html_(self) -> str:
        report = link(self.report, "report") if exists(self.report) else ""
        return card(self.name, self.outcome, {**self.facts, "pages": report})
