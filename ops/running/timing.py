"""``fedemu run --timing``: where each second of a run goes, by process and phase.

Every process marks the ends of its phases in ``timing.jsonl`` of the run directory (``protocol/host/phases.py``). Here
the marks become a table and a bar.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

from fedemu.coordinator.observer import Observers, RunObserver
from fedemu.coordinator.record.json_lines import object_in
from fedemu.coordinator.record.row import Row
from fedemu.protocol.host.phases import VARIABLE, mark, marks

FILE: Final = "timing.jsonl"
"""The file of a run directory that holds the marks."""
COMMAND: Final = "fedemu"
"""The name of the process that the user has started."""
_ORDER: Final = (
    *(COMMAND, "coordinator", "tree", "edge", "ray", "devices", "data check", "zygote", "device processes"),
    *("nursery", "trainer", "track"),
)
_NAMES: Final = {"devices": "supervisor", "tree": "edges and machines", "track": "tracker"}
"""Names for people, where a process is called otherwise by ``ps``."""
_BAR: Final = 60
"""The length of a bar in characters: the whole time of the command."""


@dataclass(frozen=True)
class Phase:
    """One phase of one process. Times are real seconds since the command was started. ``end`` is None if only the CPU
    is known; ``within`` says that it is a part of the phase before it."""

    process: str
    name: str
    cpu: float
    begin: float | None = None
    end: float | None = None
    within: bool = False


@dataclass(frozen=True)
class Timing:
    """All phases of a run. ``wall`` and ``cpu`` are those of the whole command, with every process that it started."""

    phases: Sequence[Phase]
    wall: float
    cpu: float


@contextmanager
def timing(directory: Path, wanted: bool) -> Iterator[None]:
    """Have this process and those that it starts mark their phases in ``directory``, if that is ``wanted``."""
    if not wanted:
        yield
        return
    os.environ[VARIABLE] = str((directory / FILE).absolute())
    (directory / FILE).unlink(missing_ok=True)  # the marks of an earlier life of the run, which is resumed now
    mark(COMMAND, "imports and settings")
    try:
        yield
    finally:
        mark(COMMAND, "the run")
        del os.environ[VARIABLE]


def timed(rounds: int) -> list[RunObserver]:
    """The observer that marks the phases of a coordinator with ``rounds`` rounds; none if nobody asks for them."""
    return [_PhaseObserver(rounds)] if marks() else []


class _PhaseObserver(Observers):
    def __init__(self, rounds: int) -> None:
        super().__init__()
        self._rounds = rounds

    def event(self, name: str, **fields: Any) -> None:
        if name in ("fleet_complete", "fleet_incomplete"):
            mark("coordinator", "devices attach")

    def round_finished(self, row: Row) -> None:
        if row.round == self._rounds:
            mark("coordinator", "rounds")


def read_timing(directory: Path) -> Timing | None:
    """The timing of a run that has ended. None if it was not timed."""
    try:
        lines = (directory / FILE).read_bytes().splitlines()
    except OSError:
        return None
    marks = [mark for line in lines if (mark := object_in(line)) is not None]  # a full disk may have cut a line off
    command = [mark for mark in marks if mark["process"] == COMMAND]
    if not command:
        return None
    start, last = command[0]["began"], command[-1]
    phases = [phase for each in _lives(marks) for phase in _phases(each, start)]
    phases += _silent(marks)
    phases.sort(key=lambda phase: _place(_kind(phase.process)))
    return Timing(phases, last["at"] - start, last["cpu"] + last["ended"])


def table(timing: Timing) -> str:
    """The timing for people: a table, and below it a bar for each process.

    A letter of a bar is the phase with that letter in the table; a dot is time in which the process was not there.
    """
    lines = ["process            phase                      from s    to s  wall s   CPU s"]
    signs = dict(zip((id(phase) for phase in timing.phases if phase.end is not None), cycle(ascii_lowercase)))
    for phase in timing.phases:
        name = f"{signs.get(id(phase), ' ')} {'  of which ' if phase.within else ''}{phase.name}"
        times = (
            ("", "", "")
            if phase.begin is None or phase.end is None
            else (f"{phase.begin:.2f}", f"{phase.end:.2f}", f"{phase.end - phase.begin:.2f}")
        )
        lines.append(
            f"{_shown(phase.process):<18} {name:<26} {times[0]:>6}  {times[1]:>6}  {times[2]:>6}  {phase.cpu:6.2f}"
        )
    told = sum(phase.cpu for phase in timing.phases if not phase.within)
    lines.append(
        f"{'all processes':<18} {'':<26} {'':>6}  {timing.wall:6.2f}  {timing.wall:6.2f}  {max(told, timing.cpu):6.2f}"
    )
    lines.append("")
    for process in dict.fromkeys(phase.process for phase in timing.phases):
        mine = [p for p in timing.phases if p.process == process and id(p) in signs and not p.within]
        if mine:
            lines.append(f"{_shown(process):<18} {_bar(mine, signs, timing.wall)}")
    return "\n".join(line.rstrip() for line in lines)


def _lives(marks: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The marks of each process, in their order. One process may have several parts to play.

    Trainers get a number, and so do other processes of which there are several, as with edges.
    """
    lives: dict[int, list[dict[str, Any]]] = {}
    for each in marks:
        lives.setdefault(each["pid"], []).append(each)
    for name in {life[0]["process"] for life in lives.values()}:
        alike = [life for life in lives.values() if life[0]["process"] == name]
        for number, life in enumerate(alike, start=1):
            for each in life if len(alike) > 1 or name == "trainer" else ():
                each["process"] = each["process"].replace(name, f"{name} {number}")
    return list(lives.values())


def _phases(life: Sequence[dict[str, Any]], start: float) -> Iterator[Phase]:
    """The phases of one process."""
    before, used = life[0]["began"], 0.0
    # The children of a coordinator that end are its server jobs and its trial step. Others mark phases themselves.
    with_children = any(each["process"] == "coordinator" for each in life)
    for each in life:
        spent = each["cpu"] + (each["ended"] if with_children else 0.0)
        yield Phase(each["process"], each["phase"], spent - used, before - start, each["at"] - start)
        for name, (wall, cpu) in each["parts"].items():
            yield Phase(each["process"], f"{name} ({wall:.2f} s)", cpu, within=True)
        before, used = each["at"], spent


def _silent(marks: Sequence[dict[str, Any]]) -> Iterator[Phase]:
    """The CPU of the processes that mark nothing: devices, and what trainers do after their last mark.

    Each supervisor tells it of its own devices and trainers.
    """
    spent: dict[str, float] = {}
    done: dict[int, float] = {}
    of_trainers: list[float] = []
    for each in marks:
        if _kind(each["process"]) == "devices" and each["others"]:
            used, before = each["others"]["devices"], done.get(each["pid"], 0.0)
            spent[each["phase"]] = spent.get(each["phase"], 0.0) + max(0.0, used - before)
            done[each["pid"]] = used
            of_trainers += [each["others"]["trainers"]] if each["phase"] == "rounds" else []
    ends = {each["pid"]: each["ended"] for each in marks if _kind(each["process"]) == "zygote"}
    if any(each["phase"] == "forks" for each in marks):
        spent["end"] = max(0.0, sum(ends.values()) - sum(done.values()))
    for phase, seconds in spent.items():
        yield Phase("device processes", phase, seconds)
    if of_trainers:
        known: dict[int, float] = {each["pid"]: each["cpu"] for each in marks if _kind(each["process"]) == "trainer"}
        yield Phase("trainer", "rounds, all trainers", max(0.0, sum(of_trainers) - sum(known.values())))


def _kind(process: str) -> str:
    """The name of a process without its number."""
    return process.rstrip("0123456789 ")


def _place(kind: str) -> int:
    """The place of a process in the table. Those that it does not know come last."""
    return _ORDER.index(kind) if kind in _ORDER else len(_ORDER)


def _shown(process: str) -> str:
    kind = _kind(process)
    return process.replace(kind, _NAMES.get(kind, kind), 1)


def _bar(phases: Sequence[Phase], signs: dict[int, str], wall: float) -> str:
    """The whole time of the command from left to right, with a letter for each phase."""
    cells = ["."] * _BAR
    for phase in phases:
        assert phase.begin is not None
        assert phase.end is not None
        first, last = (min(_BAR, max(0, round(_BAR * time / wall))) for time in (phase.begin, phase.end))
        cells[first:last] = signs[id(phase)] * (last - first)
    return "".join(cells)
