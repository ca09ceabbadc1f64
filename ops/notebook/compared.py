"""Runs side by side, as a notebook gets them: a table, a pandas frame, a page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedemu.ops.compare.compare import Comparison
from fedemu.ops.compare.text import columns, explanation, further_tables, text
from fedemu.ops.notebook.card import notes, table
from fedemu.ops.notebook.frames import comparison_frame
from fedemu.ops.notebook.settings import in_call
from fedemu.protocol.errors import FedemuError

if TYPE_CHECKING:
    from pandas import DataFrame

_WIDTH = 120
"""Characters that a cell of a notebook shows side by side."""


@dataclass(frozen=True, repr=False)
class ComparedRuns:
    """Runs side by side. ``repr`` is what ``fedemu compare`` prints; ``comparison`` has the numbers."""

    comparison: Comparison

    def frame(self) -> DataFrame:
        """A pandas frame with a line for each experiment: the mean of each figure over the seeds, and ``NAME_sd``.

        ``NAME_sd`` is the standard deviation over the seeds. Shares are between 0 and 1. What devices and methods of
        one's own measured are figures, too, such as ``device_metrics.norm``. Figures that no run has are left out.
        Raises FedemuError if pandas is not installed.
        """
        return comparison_frame(self.comparison)

    def page(self, out: Path | str = "compare") -> Path:
        """Write the page with tables and plots into the folder ``out``, and return its path.

        Raises ConfigurationError if the folder holds anything but an earlier comparison.
        """
        # Importing matplotlib takes a second, for which nobody else should have to wait.
        from fedemu.ops.compare.page.page import claim_folder, write_comparison

        __tracebackhide__ = True
        try:
            claim_folder(Path(out))
            return write_comparison(self.comparison, Path(out))
        except FedemuError as error:
            raise in_call(error) from error.__cause__

    def to_text(self, width: int = _WIDTH) -> str:
        """The tables for people, at most ``width`` characters wide: what is wider continues below."""
        return text(self.comparison, width)

    def to_json(self) -> str:
        """All figures, by row and by run, as ``fedemu compare --format json`` prints them."""
        return json.dumps(self.comparison.table(), allow_nan=False)

    def __repr__(self) -> str:
        return "\n".join([*self._warnings(), self.to_text()])

    def _repr_html_(self) -> str:
        first = table(columns(self.comparison))
        further = (table(cells, title=title) for title, cells in further_tables(self.comparison))
        return "".join([notes(self._warnings()), first, *further, notes(explanation(self.comparison))])

    def _warnings(self) -> list[str]:
        return [f"warning: {warning}" for warning in self.comparison.warnings]
