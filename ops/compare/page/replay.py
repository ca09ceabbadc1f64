"""The pictures of replay: how each strategy does by the number of samples that a device keeps, and by period.

Each takes the studies of a comparison, and is None if they lack its data. The pictures are those of Good et al.,
"Coordinated Replay Sample Selection for Continual Federated Learning" (figures 2, 3 and 6). Forgetting is shown as it
is, not as a change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import Affine2D

from fedemu.ops.compare.entry import Statistic
from fedemu.ops.compare.replay import ACCURACY, FORGETTING, LOSS, OBJECTIVE, PERPLEXITY, Measure, Point, ReplayStudy
from fedemu.ops.pages.axes import POINTS, SHARES, say_cut
from fedemu.ops.pages.behind import label_of
from fedemu.ops.pages.colours import GREY
from fedemu.ops.pages.style import (
    MARKERS,
    WIDTH,
    Floats,
    bare_figure,
    legend_below,
    legend_columns,
    line_look,
    new_figure,
    numbers,
    over_rounds,
    round_ticks,
)

Studies = Sequence[ReplayStudy]
Look = Mapping[str, Any]

_NO_REFERENCE = " (no run without replay)"
_APART = 0.02
"""The distance between points of neighbouring strategies, as a share of N, so that their bars can be told apart."""


def perplexity_by_size(studies: Studies) -> Figure | None:
    """The perplexity over all periods by N, the number of samples that a device keeps for replay."""
    return _by_size(studies, {PERPLEXITY})


def accuracy_by_size(studies: Studies) -> Figure | None:
    """The average accuracy by N, the number of samples that a device keeps for replay."""
    return _by_size(studies, {ACCURACY})


def loss_by_size(studies: Studies) -> Figure | None:
    """The loss over all periods by N, the number of samples that a device keeps for replay."""
    return _by_size(studies, {LOSS})


def forgetting_by_size(studies: Studies) -> Figure | None:
    """The forgetting by N: that of perplexity for language, that of accuracy for other data."""
    return _by_size(studies, {*FORGETTING.values()})


def objective_by_size(studies: Studies) -> Figure | None:
    """The objective of the kept samples by N, if it was measured."""
    return _by_size(studies, {OBJECTIVE})


def change_by_period(studies: Studies) -> Figure | None:
    """A panel for each number N of kept samples: the latest model on each period, with a line per strategy.

    It shows the first study whose stream has more than one period.
    """
    study = next((study for study in studies if study.points[0].by_period.shape[1] > 1), None)
    if study is None:
        return None
    across = min(3, len(study.sizes))
    down = -(-len(study.sizes) // across)
    figure = bare_figure(max(WIDTH, 4.2 * across), 1.2 + 2.7 * down)
    cells = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    looks = _looks([study])
    named: dict[str, Any] = {}
    for axes in cells.flat[len(study.sizes) :]:
        axes.set_visible(False)
    for axes, size in zip(cells.flat, study.sizes, strict=False):
        for line, points in study.lines.items():
            for point in points:
                if point.samples == size:
                    named[line] = _draw_periods(axes, point, looks[study.label, line])
        _scale_periods(axes, study)
        axes.set_title(f"N {size}")
        axes.set_xlabel("tested on period")
        axes.tick_params(labelbottom=True)
    figure.supylabel(_title_by_period(study), fontsize=9.5)
    figure.legend(
        named.values(),
        named,
        loc="outside lower center",
        ncols=min(6, len(named)) if across == 3 else legend_columns([*named]),
    )
    return figure


REPLAY_PLOTS: Mapping[str, Callable[[Studies], Figure | None]] = {
    "replay_perplexity": perplexity_by_size,
    "replay_accuracy": accuracy_by_size,
    "replay_loss": loss_by_size,
    "replay_forgetting": forgetting_by_size,
    "replay_objective": objective_by_size,
}
WIDE_REPLAY_PLOTS: Mapping[str, Callable[[Studies], Figure | None]] = {"replay_by_period": change_by_period}


def _by_size(studies: Studies, wanted: set[Measure]) -> Figure | None:
    """One line per study and strategy by N, with the deviation over the seeds. A dashed line is without replay."""
    shown = [(study, measure) for study in studies for measure in study.measures if measure in wanted]
    if not shown:
        return None
    measure = shown[0][1]
    changes = all(study.is_change(measure) for study, measure in shown)
    # A change and a level have no axis in common. So all studies show their changes against no replay, or none does.
    values: Callable[[ReplayStudy, Point, Measure], Statistic] = (
        (lambda study, point, measure: study.value(point, measure))
        if changes
        else (lambda study, point, measure: point.entry.figures[measure.key])
    )
    looks = _looks([study for study, _ in shown])
    title = measure.name.capitalize()
    if not changes and measure.against != "absolute":
        some = any(study.reference for study, _ in shown)
        title += " (not all with a run without replay)" if some else _NO_REFERENCE
    figure, axes = new_figure(title, height=3.6 + 0.21 * -(-len(looks) // 2))
    middle = (len(looks) - 1) / 2
    for study, own in shown:
        for line, points in study.lines.items():
            look = looks[study.label, line]
            found = [values(study, point, own) for point in points]
            if all(figure.mean is None for figure in found):
                continue
            apart = (1 + _APART) ** (list(looks).index((study.label, line)) - middle)
            axes.errorbar(
                [point.samples for point in points],
                numbers([figure.mean for figure in found]),
                yerr=numbers([figure.deviation or 0.0 for figure in found]),
                linewidth=1.5,
                markersize=4.5,
                capsize=2,
                elinewidth=0.9,
                transform=Affine2D().scale(apart, 1) + axes.transData,
                **look,
            )
        _draw_reference(axes, study, own, changes, several=len(shown) > 1)
    if not any(np.isfinite(line.get_ydata(orig=True)).any() for line in axes.lines):
        return None
    _scale_sizes(axes, sorted({size for study, _ in shown for size in study.sizes}))
    _scale_values(axes, measure, changes)
    if not changes:
        say_cut(axes)
    return legend_below(figure, axes)


def _draw_reference(axes: Any, study: ReplayStudy, measure: Measure, changes: bool, several: bool) -> None:
    """Draw the runs without replay: as a line at 0 among changes, or else as their level with its deviation."""
    label = "no replay" if not several else f"{study.label}: no replay"
    if changes:
        axes.axhline(0, color=GREY, linewidth=1.2, linestyle="--", label="_" if several else label)
    elif study.reference is not None:
        level = study.reference.figures[measure.key]
        if level.mean is not None:
            spread = level.deviation or 0.0
            axes.axhline(level.mean, color=GREY, linewidth=1.2, linestyle="--", label=label)
            axes.axhspan(level.mean - spread, level.mean + spread, color=GREY, alpha=0.2, linewidth=0)


def _scale_sizes(axes: Any, sizes: Sequence[int]) -> None:
    """Make the horizontal axis one of ``sizes``, logarithmic, with a tick at each."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(sizes[0] / 1.35, sizes[-1] * 1.35)
    axes.set_xlabel("samples that a device keeps for replay, N")


def _scale_values(axes: Any, measure: Measure, changes: bool) -> None:
    """Give the vertical axis the unit and the name of what is drawn."""
    if changes and measure.against == "relative":
        axes.yaxis.set_major_formatter(SHARES)
        axes.set_ylabel("change against no replay")
    elif changes and measure.against == "difference":
        axes.yaxis.set_major_formatter(POINTS)
        axes.set_ylabel("percentage points against no replay")
    elif measure.form == "share":
        axes.yaxis.set_major_formatter(SHARES)
        axes.set_ylabel(measure.name)
    else:
        axes.set_ylabel(measure.name)


def _draw_periods(axes: Any, point: Point, look: Look) -> Any:
    """Draw the mean over the runs and a band of one sample deviation. Returns the line."""
    known = point.by_period[~np.isnan(point.by_period).all(axis=1)]
    mean: Floats = known.mean(axis=0) if len(known) else np.full(point.by_period.shape[1], np.nan)
    periods = np.arange(len(mean)) + 1
    (line,) = axes.plot(periods, mean, linewidth=1.5, markersize=3.5, **look)
    if len(known) > 1:
        spread = known.std(axis=0, ddof=1)
        band = {"color": look["color"], "alpha": 0.13, "linewidth": 0, "label": f"_{look['label']}"}
        axes.fill_between(periods, mean - spread, mean + spread, **band)
    return line


def _scale_periods(axes: Any, study: ReplayStudy) -> None:
    """Give both axes of a panel their ticks and units, and draw the line of no change."""
    over_rounds(axes)
    if study.reference is not None:
        axes.axhline(0, color=GREY, linewidth=1.0, linestyle="--")
    if study.reference is not None and not study.language:
        axes.yaxis.set_major_formatter(POINTS)
    elif study.reference is not None or not study.language:
        axes.yaxis.set_major_formatter(SHARES)
    axes.yaxis.set_major_locator(round_ticks(6))


def _title_by_period(study: ReplayStudy) -> str:
    """The name of what the panels of ``change_by_period`` show."""
    if study.reference is None:
        return f"{'perplexity' if study.language else 'accuracy'} of the latest model{_NO_REFERENCE}"
    if study.language:
        return "change in perplexity against no replay"
    return "accuracy, percentage points against no replay"


def _looks(studies: Studies) -> dict[tuple[str, str], Look]:
    """The colour, line style, marker and name of each line, by the label of its study and by its strategy.

    The colour is that of the first experiment of the line in the other pictures.
    """
    several = len(studies) > 1
    keys = [(study.label, line, points[0].entry.place) for study in studies for line, points in study.lines.items()]
    return {
        (study, line): {
            **line_look(place),
            "marker": MARKERS[number % len(MARKERS)],
            "label": label_of(f"{study}: {line}" if several else line),
        }
        for number, (study, line, place) in enumerate(keys)
    }
