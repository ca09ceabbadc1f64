"""The places of a fleet: each is a supervisor with its part of the devices, wherever an engine puts it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from fedemu.ops.experiment import Experiment, Runtime
from fedemu.ops.experiment.sources import NOT_SETTINGS, toml_of
from fedemu.ops.experiment.toml_text import toml_value
from fedemu.ops.extras import require
from fedemu.ops.homes import expanded
from fedemu.ops.running.together import LAST_PORT
from fedemu.protocol.errors import ConfigurationError

PATIENCE_SECONDS: Final = 600.0
"""The real seconds for which both sides wait for each other: an engine may need minutes to replace a machine."""
_SETTLED_ELSEWHERE: Final = frozenset(
    {"bind", "connect", "keys", "server_key", "insecure", "transport", "track", "on", "nodes", "shared_state"}
)
"""The settings of a machine that a job gives to its processes itself, or that have a table of their own."""


def require_engine(on: str) -> None:
    """Raise ConfigurationError if ``--on`` names no engine, or one whose package is missing."""
    if on != "ray" and not re.fullmatch(r"ray://[^/\s]+:\d+", on):
        raise ConfigurationError(f"--on {on!r} is no engine; write ray, or ray://HOST:10001 for a cluster elsewhere")
    require("ray", "ray", "--on ray")


def require_no_edges(experiment: Experiment, command: str) -> None:
    """Raise ConfigurationError if an experiment asks for edges, which ``command`` does not start."""
    if experiment.tree.edges:
        raise ConfigurationError(
            f"{command} starts no edges, and tree.edges asks for them; add --set tree.edges=0, the results are the same"
        )


def require_processes(runtime: Runtime, command: str) -> None:
    """Raise ConfigurationError if everything is to be in one process, and ``command`` starts several."""
    if runtime.transport == "memory":
        raise ConfigurationError(
            f"{command} starts processes on several machines, and runtime.transport = memory is one process; add "
            "--set runtime.transport=zmq"
        )


def waits(experiment: Experiment, runtime: Runtime) -> list[str]:
    """The same waits as ``patient``, as overrides."""
    waiting, own = patient(experiment, runtime)
    return [
        f"fleet.start_timeout={waiting.fleet.start_timeout}",
        f"fleet.give_up={waiting.fleet.give_up}",
        f"runtime.connect_seconds={own.connect_seconds}",
        f"runtime.lost_seconds={own.lost_seconds}",
    ]


def patient(experiment: Experiment, runtime: Runtime) -> tuple[Experiment, Runtime]:
    """Both with waits as long as an engine may need, where nobody has set them. No result depends on these times."""
    fleet, times = experiment.fleet, ("start_timeout", "give_up")
    waits = {name: PATIENCE_SECONDS for name in times if name not in fleet.model_fields_set}
    return experiment.model_copy(update={"fleet": fleet.model_copy(update=waits)}), patient_machine(runtime)


def patient_machine(runtime: Runtime) -> Runtime:
    """This machine's settings with such waits. A resumed run has those of its experiment already."""
    own = ("connect_seconds", "lost_seconds")
    return runtime.model_copy(update={name: PATIENCE_SECONDS for name in own if name not in runtime.model_fields_set})


def require_places(experiment: Experiment, places: int, option: str) -> None:
    """Raise ConfigurationError if there are more places than devices."""
    if places > experiment.fleet.devices:
        raise ConfigurationError(
            f"{option} {places} is more than the {experiment.fleet.devices} devices of the experiment; say less"
        )


def share(devices: int, places: int) -> list[int]:
    """How many devices each place has. The first ones have one more if the devices do not divide evenly."""
    each, over = divmod(devices, places)
    return [each + (place < over) for place in range(places)]


def share_in_words(devices: int, places: int) -> str:
    """How many devices each place has, for people: one number or two."""
    most, least = (share(devices, places)[place] for place in (0, -1))
    return f"{most:,}" if most == least else f"{least:,} or {most:,}"


def metrics_ports(first: int, places: int) -> list[int]:
    """The port of each place's metrics, from ``first`` on: places may share a node. 0 means none, for all of them.

    Raises ConfigurationError if there are not so many ports.
    """
    if first + places - 1 > LAST_PORT:
        raise ConfigurationError(
            f"the metrics of {places} places need as many ports from {first} on, and {LAST_PORT} is the last one; "
            "choose a lower one with --metrics-port"
        )
    return [first and first + place for place in range(places)]


def variables(runtime: Runtime) -> Iterator[tuple[str, str]]:
    """The environment by which processes elsewhere get this machine's folders, and the settings that it was given."""
    for name in ("FEDEMU_DATA", "FEDEMU_CACHE"):
        if name in os.environ:
            yield name, str(expanded(os.environ[name]).absolute())
    for name in sorted(runtime.model_fields_set - _SETTLED_ELSEWHERE):
        yield f"FEDEMU_RUNTIME__{name.upper()}", _value(getattr(runtime, name))
    for name in sorted(runtime.track.model_fields_set):
        yield f"FEDEMU_TRACK__{name.upper()}", _value(getattr(runtime.track, name))


def settled_variables() -> list[str]:
    """The variables of this environment that have decided on the experiment, and must not decide again."""
    return [
        name
        for name in sorted(os.environ)
        if name.startswith("FEDEMU_")
        and name not in NOT_SETTINGS
        and not name.startswith(("FEDEMU_RUNTIME__", "FEDEMU_TRACK__"))
    ]


def _value(value: object) -> str:
    """A value as a variable says it. A text that would be read as something else is quoted."""
    if isinstance(value, str):
        return value if _is_plain(value) else toml_value(value)
    return toml_value(list(value) if isinstance(value, tuple) else value)


def _is_plain(text: str) -> bool:
    try:
        return bool(toml_of(text, "") == text)
    except ConfigurationError:
        return False
