"""Events on their way into the run directory."""

from __future__ import annotations

from typing import Any

from fedemu.coordinator.observer import Observers
from fedemu.coordinator.record.run_directory import RunDirectory
from fedemu.coordinator.timeline import Timeline


class EventLog(Observers):
    """Writes every event with the times at which it happened; silent otherwise."""

    def __init__(self, run: RunDirectory, timeline: Timeline) -> None:
        super().__init__()
        self._run = run
        self._timeline = timeline

    def event(self, name: str, **fields: Any) -> None:
        self._run.event(name, self._timeline.time, self._timeline.spent, **fields)
