"""The accuracy of devices' models after each epoch of local training, drawn from ``local_curves.json``.

Lee et al., "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning", figure 6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedemu.ops.pages.axes import fit_shares
from fedemu.ops.pages.colours import BLUE, ORANGE
from fedemu.ops.pages.style import legend_below, marker, new_figure, numbers, round_ticks
from fedemu.protocol.wording import counted

Curves = Mapping[str, Any]
"""What ``local_curves.json`` holds, empty if there is no such file."""


def local_curves(found: Curves) -> Figure | None:
    """The accuracy of devices' models on their own distribution and outside of it, after each epoch of local training.

    A line is the mean over the devices, the band around it their standard deviation. (Lee et al., 2022, figure 6)
    """
    epochs = found.get("epochs")
    if not epochs:
        return None
    figure, axes = new_figure(f"Local training, {counted(len(found['devices']), 'device')}")
    shown: list[float] = []
    for key, label, colour in (("in_local", "in-local", BLUE), ("out_local", "out-local", ORANGE)):
        values = numbers(found[key])
        known = ~np.isnan(values).all(axis=1)
        if not known.any():
            continue
        means, spread = np.nanmean(values[known], axis=1), np.nanstd(values[known], axis=1)
        at = np.array(epochs)[known]
        name = f"{label}, mean and spread"
        axes.fill_between(at, means - spread, means + spread, color=colour, alpha=0.18, linewidth=0, label=f"_{name}")
        axes.plot(at, means, color=colour, linewidth=1.8, marker=marker(len(at)), label=name)
        shown += [*(means - spread), *(means + spread)]
    if not axes.lines:
        return None
    fit_shares(axes, shown, "test accuracy")
    axes.xaxis.set_major_locator(round_ticks(integer=True))
    axes.set_xlabel("local epoch (0: the global model)")
    return legend_below(figure, axes)


LOCAL_PLOTS: Mapping[str, Callable[[Curves], Figure | None]] = {"local_curves": local_curves}
