"""Observers of a coordinator, such as the display and the logs. They are told what happens and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from fedemu.coordinator.record.row import Row
from fedemu.coordinator.timeline import Timeline
from fedemu.protocol.wording import some_of

Direction = Literal["down", "up"]


@dataclass(frozen=True)
class Absence:
    """Devices without a connection, for which the coordinator waits.

    ``devices`` is their number, and ``connected`` the number of those that have a connection. After ``seconds`` of real
    time the wait is over, and what ``then`` says happens, such as ``they count as failed``. ``seconds`` is None if the
    coordinator does not wait for them now, because it computes. ``machines`` are the names of machines that were here
    and have no connection.
    """

    devices: int
    connected: int
    seconds: float | None = None
    then: str = ""
    machines: tuple[str, ...] = ()

    @property
    def away(self) -> str:
        """The names of a few of the machines, and how many more there are; empty if there are none."""
        return some_machines(self.machines)


def some_machines(machines: Sequence[str]) -> str:
    """The names of a few machines, and how many more there are; empty if there are none."""
    return some_of([name if name.isprintable() else repr(name)[1:-1] for name in machines])


class RunObserver(Protocol):
    """Watches a run. Calls come on the event loop and have to return at once. Times are seconds of the experiment."""

    def resumed(self, rows: Sequence[Row], spent: float) -> None:
        """The run goes on after these rounds, for which ``spent`` real seconds went by. Told before the fleet comes."""
        ...

    def waiting(self, absence: Absence | None) -> None:
        """The coordinator lacks devices for longer than a moment. None if it does not. Told once in a second."""
        ...

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        """An attempt at a round begins, with ``selected`` devices in its first cohort. Attempts count from 0."""
        ...

    def round_finished(self, row: Row) -> None:
        """The round is durable; ``row`` is what is known of it."""
        ...

    def device_result(self, outcome: str) -> None:
        """The work of a selected device ended with this outcome."""
        ...

    def fleet(self, counts: Mapping[str, int]) -> None:
        """Devices by state: ``enrolled``, ``connected``, ``online`` (by the experiment's clock), ``busy`` (asked).

        Under the wall clock those that are off-line by plan are not connected, but ``away``.
        """
        ...

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        """``step`` of at most ``steps`` steps of a server job are done. This is told a few times a second."""
        ...

    def event(self, name: str, **fields: Any) -> None:
        """Something happened that ``events.jsonl`` records."""
        ...

    def rejected(self, reason: str) -> None:
        """A message could not be used."""
        ...

    def traffic(self, kind: str, direction: Direction, size: int) -> None:
        """``size`` more bytes were sent. ``kind`` is ``emulated`` or ``wire``."""
        ...


class Observers:
    """Passes everything on to several observers. Without observers it is silent."""

    def __init__(self, observers: Sequence[RunObserver] = ()) -> None:
        self._observers = tuple(observers)

    def resumed(self, rows: Sequence[Row], spent: float) -> None:
        for observer in self._observers:
            observer.resumed(rows, spent)

    def waiting(self, absence: Absence | None) -> None:
        for observer in self._observers:
            observer.waiting(absence)

    def round_started(self, round: int, attempt: int, virtual_time: float, selected: int) -> None:
        for observer in self._observers:
            observer.round_started(round, attempt, virtual_time, selected)

    def round_finished(self, row: Row) -> None:
        for observer in self._observers:
            observer.round_finished(row)

    def device_result(self, outcome: str) -> None:
        for observer in self._observers:
            observer.device_result(outcome)

    def fleet(self, counts: Mapping[str, int]) -> None:
        for observer in self._observers:
            observer.fleet(counts)

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        for observer in self._observers:
            observer.server_job(name, round, step, steps)

    def event(self, name: str, **fields: Any) -> None:
        for observer in self._observers:
            observer.event(name, **fields)

    def rejected(self, reason: str) -> None:
        for observer in self._observers:
            observer.rejected(reason)

    def traffic(self, kind: str, direction: Direction, size: int) -> None:
        for observer in self._observers:
            observer.traffic(kind, direction, size)


class EventLog(Observers):
    """An observer that hands every event to ``write``, with the times at which it happened.

    ``write`` has the form of ``RunDirectory.event``. Times are seconds since the run's start.
    """

    def __init__(self, write: Callable[..., None], timeline: Timeline) -> None:
        super().__init__()
        self._write = write
        self._timeline = timeline

    def event(self, name: str, **fields: Any) -> None:
        self._write(name, self._timeline.time, self._timeline.spent, **fields)
