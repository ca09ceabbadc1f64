"""Which settings have no effect, because of what other settings say.

Such a setting is no mistake, and the run is the same without it. Whoever has set it is told in one line, because he
expects something of it. A setting that has its default is not told, nor is one that only a preset has set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from pydantic import BaseModel

from fedemu.ops.experiment.experiment import Experiment
from fedemu.ops.experiment.mistakes import shown
from fedemu.ops.experiment.runtime import Runtime

Reason = Callable[[Experiment, Runtime], str]
"""Why a setting has no effect, as the end of a sentence that begins with "because". Empty if it has one."""


class WithoutEffect:
    """Gathers settings that somebody has set, over all experiments of a command."""

    def __init__(self) -> None:
        self._reasons: dict[str, list[str]] = {}
        self._values: dict[str, list[str]] = {}

    def look(self, experiment: Experiment, runtime: Runtime, chosen: Mapping[str, Any]) -> None:
        """Look at one experiment. ``chosen`` holds what somebody has set for it, as plain tables."""
        for key, reason in _REASONS.items():
            for path in _chosen(key.split("."), chosen):
                found = _value(experiment, runtime, path)
                if found is not None:
                    name = ".".join(path)
                    self._reasons.setdefault(name, []).append(reason(experiment, runtime))
                    self._values.setdefault(name, []).append(found)

    def tell(self, say: Callable[[str], None]) -> None:
        """Tell a line for people for each setting that has no effect in any experiment in which it was set."""
        for name, reasons in self._reasons.items():
            if all(reasons):
                values = ", ".join(filter(None, _each_once(self._values[name])))
                why = ", or ".join(_each_once(reasons))
                say(f"warning: {name}{values and f' = {values}'} has no effect, because {why}")


def _each_once(texts: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(texts))


def _chosen(keys: list[str], table: Any) -> Iterator[list[str]]:
    """The full keys in ``table`` that the keys of a rule mean. ``*`` means every name that comes with fedemu."""
    if not keys:
        yield []
        return
    first, *rest = keys
    for name in [*table] if isinstance(table, Mapping) else []:
        if first == name or (first == "*" and ":" not in name):
            yield from ([name, *inner] for inner in _chosen(rest, table[name]))


def _value(experiment: Experiment, runtime: Runtime, path: list[str]) -> str | None:
    """How a setting is written. None if it has its default. Empty for a table of options."""
    here: Any = experiment
    if path[0] == "runtime":
        here, path = runtime, path[1:]
    elif path[0] == "track":
        here = runtime
    default: Any = None
    for name in path:
        if isinstance(here, BaseModel):
            field = type(here).model_fields[name]
            here, default = getattr(here, name), field.get_default(call_default_factory=True)
        else:
            here, default = here[name], None
    if here == default:
        return None
    if isinstance(here, Mapping):
        return ""
    plain = here.model_dump() if isinstance(here, BaseModel) else here
    return shown([*plain] if isinstance(plain, tuple) else plain)


def _unless(has_effect: Callable[[Experiment], object], why: str) -> Reason:
    """The reason ``why`` for all experiments in which something has no effect."""
    return lambda experiment, runtime: "" if has_effect(experiment) else why


def _machine(has_effect: Callable[[Runtime], object], why: str) -> Reason:
    """The same for what this machine's settings decide."""
    return lambda experiment, runtime: "" if has_effect(runtime) else why


def _for(*strategies: str) -> Reason:
    """The reason for a setting that only some strategies of replay use."""

    def reason(experiment: Experiment, runtime: Runtime) -> str:
        if experiment.replay.strategy in strategies:
            return ""
        names = " or ".join(f'"{strategy}"' for strategy in strategies)
        return _KEEPS_NOTHING(experiment, runtime) or f"it is for replay.strategy = {names}"

    return reason


def _not_asked(experiment: Experiment, runtime: Runtime) -> str:
    """Why devices are not asked what to keep. Empty if they are."""
    own = experiment.replay.strategy == "own"
    return 'replay.strategy = "own" leaves all questions to the method' if own else _KEEPS_NOTHING(experiment, runtime)


def _untrained(experiment: Experiment, runtime: Runtime) -> str:
    """Why no device trains. Empty if devices do."""
    method, options = experiment.algorithm.name, experiment.algorithm.options
    if method == "central":
        return 'algorithm.name = "central" trains at the coordinator alone, as its own options say'
    if method in ("afl", "ncm") and not options.get("warm_up"):
        return f'algorithm.name = "{method}" trains nothing without algorithm.options.warm_up'
    return ""


def _in_training(reason: Reason = lambda experiment, runtime: "") -> Reason:
    """The reason for a setting of the training at devices: that there is none, or else ``reason``."""
    return lambda experiment, runtime: _untrained(experiment, runtime) or reason(experiment, runtime)


def _restarts(experiment: Experiment, runtime: Runtime) -> str:
    replay = experiment.replay
    if replay.strategy == "coordinated" and replay.final == "convex":
        return 'replay.final = "convex" has no random beginning'
    return _for("diversity", "coordinated")(experiment, runtime)


def _no_engine(experiment: Experiment, runtime: Runtime) -> str:
    return _IN_MEMORY(experiment, runtime) if runtime.on else "runtime.on names no engine"


def _lr_restart(experiment: Experiment, runtime: Runtime) -> str:
    if experiment.stream.period_count == 1:
        return "the stream has only one period"
    return "" if experiment.local.lr_decay != 1.0 else "local.lr_decay = 1.0 leaves the learning rate as it is"


_KEEPS_NOTHING = _unless(lambda it: it.replay.strategy != "none", 'replay.strategy = "none" keeps no samples')
_NOT_PUBLIC = _unless(lambda it: it.data.public.fraction, "data.public.fraction = 0.0 makes no data public")
_NO_TEXTS = _unless(lambda it: it.data.text.kind != "none", 'data.text.kind = "none" says that the data are no texts')
_NO_TRACKER = _machine(lambda machine: machine.track.to, "track.to names no tracker")
_IN_MEMORY = _machine(
    lambda machine: machine.transport != "memory", 'runtime.transport = "memory" runs everything in one process'
)
_ALONE = ("serial", "plain")

_REASONS: Final[Mapping[str, Reason]] = {
    **{f"data.public.{key}": _NOT_PUBLIC for key in ("validation", "imbalance")},
    **{f"data.text.{key}": _NO_TEXTS for key in ("length", "vocabulary", "tokenizer", "column")},
    "data.partition.retry": _unless(
        lambda it: getattr(it.data.partition, "min_samples", 1), "data.partition.min_samples = 0 is always met"
    ),
    "algorithm.loss": lambda experiment, runtime: (
        "" if experiment.algorithm.name == "central" else _untrained(experiment, runtime)  # that one refuses any other
    ),
    "algorithm.terms.*": _unless(
        lambda it: it.stream.period_count > 1,
        "it remembers periods that are over, and the stream has only one; set stream.kind",
    ),
    **{
        f"local.{key}": _in_training()
        for key in ("steps", "batch_size", "lr", "momentum", "weight_decay", "lr_decay", "augment")
    },
    "local.epochs": _in_training(_unless(lambda it: not it.local.steps, "local.steps counts in its place")),
    "local.lr_restart": _in_training(_lr_restart),
    "local.stack": _unless(
        lambda it: it.local.executor not in _ALONE, "local.executor computes devices one after another"
    ),
    **{f"replay.{key}": _KEEPS_NOTHING for key in ("capacity", "budget")},
    **{f"replay.{key}": _not_asked for key in ("objective", "census", "memory_mib")},
    "replay.proportion": _for("fixed_proportion"),
    "replay.restarts": _restarts,
    **{f"replay.{key}": _for("coordinated") for key in ("iterations", "targets", "final")},
    "faults.corruptions": _unless(lambda it: it.faults.corrupt_rate, "faults.corrupt_rate = 0.0 damages no reply"),
    "faults.downtime": _unless(
        lambda it: it.faults.crash_rate or it.faults.leave_rate or it.faults.silence_rate,
        "the rates of crashes, leaves and silences in [faults] are 0",
    ),
    "evaluate.full_every": _unless(
        lambda it: it.evaluate.samples, "evaluate.samples = 0 evaluates every time on all test samples"
    ),
    "diagnose.samples": _unless(lambda it: it.diagnose.every, "diagnose.every = 0 diagnoses no round"),
    **dict.fromkeys(("fleet.link", "tree.edges"), _IN_MEMORY),
    **{
        f"runtime.{key}": _IN_MEMORY
        for key in ("bind", "keys", "insecure", "trainers", "per_process", "on", "connect_seconds", "lost_seconds")
    },
    "runtime.metrics_address": _machine(
        lambda machine: machine.metrics_port, "runtime.metrics_port = 0 serves no metrics"
    ),
    **{f"runtime.{key}": _no_engine for key in ("nodes", "shared_state")},
    **{f"track.{key}": _NO_TRACKER for key in ("out", "project", "patience")},
}
"""The settings that need others to have an effect, by their full keys."""
