"""The results of one experiment with several seeds, as a notebook gets them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedemu.ops.compare.compare import compare
from fedemu.ops.notebook.card import card, from_here, link
from fedemu.ops.notebook.compared import ComparedRuns
from fedemu.ops.notebook.result import Result
from fedemu.protocol.host.paths import exists

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, repr=False)
class SeedResults:
    """The results of one experiment with several seeds, in the order of the seeds. ``group[0]`` is the first one.

    ``folder`` is absolute, as the directories of the results are.
    """

    folder: Path
    results: Sequence[Result]

    @classmethod
    def read(cls, folder: Path, directories: Sequence[Path]) -> SeedResults:
        """Read the runs ``directories`` of the group in ``folder``."""
        return cls(folder.absolute(), tuple(map(Result.read, directories)))

    def rows(self) -> DataFrame:
        """The rounds of all seeds as one pandas frame, as ``Result.rows()`` has them, with ``seed`` as first column.

        Raises FedemuError if pandas is not installed.
        """
        frames = [result.rows() for result in self.results]
        import pandas

        for result, frame in zip(self.results, frames, strict=True):
            frame.insert(0, "seed", result.settings["seed"])
        return pandas.concat(frames, ignore_index=True)

    @property
    def compared(self) -> ComparedRuns:
        """The figures over the seeds: mean and standard deviation."""
        return ComparedRuns(compare([from_here(result.directory) for result in self.results]))

    @property
    def page(self) -> Path:
        """The file of the page that compares the seeds."""
        return self.folder / "compare" / "compare.html"

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, place: int) -> Result:
        return self.results[place]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __repr__(self) -> str:
        return f"{self.compared.to_text()}\n  folder  {from_here(self.folder)}"

    def _repr_html_(self) -> str:
        of_seeds = {f"seed {result.settings['seed']}": result.facts["accuracy"] for result in self.results}
        page = link(self.page, "comparison") if exists(self.page) else ""
        facts = {**of_seeds, "folder": str(from_here(self.folder)), "pages": page}
        first = self.results[0]
        outcomes = ", ".join(dict.fromkeys(result.outcome for result in self.results))
        return card(f"{first.name}, {len(self)} seeds", outcomes, facts) + self.compared._repr_html_()
