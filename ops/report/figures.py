"""The figures of a run by name: those of its page, which notebooks draw too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedemu.coordinator.record.json_lines import read_object
from fedemu.coordinator.record.run import Run, read_generated, read_run
from fedemu.ops.experiment.near import did_you_mean
from fedemu.ops.pages.parts import Draw, bound
from fedemu.ops.pages.style import drawn
from fedemu.ops.report.generated import generated_plots
from fedemu.ops.report.plots.diagnosis import DIAGNOSIS_PLOTS, of_rounds
from fedemu.ops.report.plots.local_curves import LOCAL_PLOTS
from fedemu.ops.report.plots.measures import MEASURES
from fedemu.ops.report.plots.one_round import models_of_last_round, models_of_worst_round
from fedemu.ops.report.plots.periods import PERIOD_PLOTS
from fedemu.ops.report.plots.replay import REPLAY_PLOTS
from fedemu.ops.report.plots.rounds import PLOTS, class_accuracy
from fedemu.ops.results.periods import period_results
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file

LOCAL_CURVES: Final = "local_curves.json"
"""The file of a run directory that ``fedemu report --curves`` writes."""
GENERATED: Final = "Generated samples"
"""The heading of what a method generated."""
ROUNDS: Final = "Round by round"
"""The heading of the pictures that every run has."""
Plot = Callable[..., Figure | None]
_OF_CLASSES: Final[Sequence[Plot]] = (
    class_accuracy,
    models_of_worst_round,
    models_of_last_round,
)
"""The plots that take the names of classes."""


def figure(directory: Path, name: str) -> Figure:
    """One figure of a run, as on its page: ``accuracy``, ``class_accuracy``, ``outcomes`` and so on.

    Raises ConfigurationError if ``directory`` holds no run, or if the run has no such figure; then it names those that
    the run has.
    """
    draws = all_figures(directory)
    found = drawn(draws[name]) if name in draws else None
    if found is None:
        has = figure_names(directory)
        hint = did_you_mean(name, has) or f"; it has {', '.join(has) or 'none yet'}"
        raise ConfigurationError(f'the run in {directory} has no figure "{name}"{hint}')
    return found


def all_figures(directory: Path) -> dict[str, Draw]:
    """All figures of a run by name, in the order of its page. Raises ConfigurationError if there is no run."""
    return {name: draw for section in figures(directory).values() for name, draw in section.items()}


def figure_names(directory: Path) -> list[str]:
    """The names of the figures that a run has data for, in the order of its page. Each is drawn to find out."""
    return [name for name, draw in all_figures(directory).items() if drawn(draw) is not None]


def figures(
    directory: Path, run: Run | None = None, generated: Mapping[int, Mapping[str, NDArray[Any]]] | None = None
) -> dict[str, dict[str, Draw]]:
    """All figures by name, by the heading of their section on the page. A run need not have data for all of them.

    ``run`` and ``generated`` are what the directory holds, if that was read already.
    """
    run = read_run(directory) if run is None else run
    generated = read_generated(directory) if generated is None else generated
    results = period_results(run)
    return {
        "Periods": bound(PERIOD_PLOTS, results) if results else {},
        "Replay": bound(REPLAY_PLOTS, run.rows),
        ROUNDS: bound(_with_names(PLOTS, run), run.rows),
        "Measures of the method": bound(MEASURES, run.rows),
        "Local training": bound(LOCAL_PLOTS, _local_curves(directory)),
        "Diagnosed rounds": bound(_with_names(DIAGNOSIS_PLOTS, run), of_rounds(run.diagnosis)),
        GENERATED: bound(generated_plots(generated), generated),
    }


def _with_names(plots: Mapping[str, Plot], run: Run) -> dict[str, Plot]:
    """The plots, of which those that show classes name them as the run's data do."""
    return {name: partial(plot, names=run.class_names) if plot in _OF_CLASSES else plot for name, plot in plots.items()}


def _local_curves(directory: Path) -> Mapping[str, object]:
    """What ``local_curves.json`` holds, empty if there is no such file."""
    file = directory / LOCAL_CURVES
    return read_object(file.read_bytes(), file) if is_file(file) else {}
