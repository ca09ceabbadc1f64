"""The words for the replay of an experiment in a comparison, made from its ``[replay]`` table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from fedemu.ops.experiment.tables.stream import Strategy

NAMED = ("strategy", "budget", "capacity", "proportion", "restarts", "iterations", "targets", "final", "objective")
"""The settings that ``replay_label`` names, so that no other part of a label has to."""
_USUAL = {"proportion": 0.5, "restarts": 3, "iterations": 1, "targets": "mean", "final": "zero_diagonal"}


def samples_kept(replay: Mapping[str, Any]) -> int:
    """N, the number of samples that a device keeps after a period. 0 without replay."""
    return 0 if replay.get("strategy", "none") == "none" else int(replay.get("budget") or replay.get("capacity") or 0)


def strategy_place(replay: Mapping[str, Any]) -> tuple[int, int]:
    """A sort key for strategies: the order of the configuration, then the iterations."""
    strategies: tuple[str, ...] = get_args(Strategy)
    name = replay.get("strategy", "none")
    place = strategies.index(name) if name in strategies else len(strategies)
    return place, int(replay.get("iterations", _USUAL["iterations"]))


def strategy_label(replay: Mapping[str, Any]) -> str:
    """The strategy with the options that matter to it, without the number of samples."""
    strategy = str(replay.get("strategy", "none"))

    def value(option: str) -> Any:
        return replay.get(option, _USUAL[option])

    label = strategy.replace("_", " ")
    if strategy == "fixed_proportion":
        label += f" {value('proportion'):g}"
    if strategy == "coordinated":
        label += f", {value('iterations')} iteration{'s' if value('iterations') != 1 else ''}"
        if value("targets") != _USUAL["targets"]:
            label += f", targets {value('targets')}"
        if value("final") != _USUAL["final"]:
            label += f", final {value('final')}"
    solved = strategy == "diversity" or (strategy == "coordinated" and value("final") == "zero_diagonal")
    if solved and value("restarts") != _USUAL["restarts"]:
        label += f", {value('restarts')} restarts"
    return label


def replay_label(replay: Mapping[str, Any]) -> str:
    """The strategy and the number of samples that are kept, or ``no replay``."""
    kept = samples_kept(replay)
    return f"{strategy_label(replay)}, N {kept}" if kept else "no replay"
