"""What the replay of an experiment is called where several are compared, from its ``[replay]`` table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from fedemu.ops.experiment.tables.stream import Strategy

NAMED = ("strategy", "budget", "capacity", "proportion", "restarts", "iterations", "targets", "final")
"""The settings that ``replay_label`` tells, so that nothing else has to name them."""
_USUAL = {"proportion": 0.5, "restarts": 3, "iterations": 1, "targets": "mean", "final": "zero_diagonal"}


def samples_kept(replay: Mapping[str, Any]) -> int:
    """N, the samples that a device keeps after a period; 0 without replay."""
    return 0 if replay.get("strategy", "none") == "none" else int(replay.get("budget") or replay.get("capacity") or 0)


def strategy_place(replay: Mapping[str, Any]) -> tuple[int, int]:
    """By which strategies are put in order: as the configuration names them, and by their iterations."""
    strategies: tuple[str, ...] = get_args(Strategy)
    name = replay.get("strategy", "none")
    place = strategies.index(name) if name in strategies else len(strategies)
    return place, int(replay.get("iterations", _USUAL["iterations"]))


def strategy_label(replay: Mapping[str, Any]) -> str:
    """The strategy and those of its options that matter to it; not how many samples it keeps."""
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
    """The strategy and how many samples are kept."""
    kept = samples_kept(replay)
    return f"{strategy_label(replay)}, N {kept}" if kept else "no replay"
