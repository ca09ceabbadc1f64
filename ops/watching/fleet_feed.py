"""What the coordinator tells the live page: what each device does, the open ask, and the server job that runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedemu.coordinator.observer import Observers
from fedemu.coordinator.service.view import Doing, FleetView
from fedemu.ops.watching.feed import FLEET, Feed, States

_CODES: Mapping[Doing, int] = {
    "absent": States.ABSENT,
    "online": States.ONLINE,
    "asked": States.ASKED,
    "training": States.TRAINING,
    "uploading": States.UPLOADING,
    "away": States.AWAY,
    "crashed": States.CRASHED,
}


class FleetFeed(Observers):
    """An observer that adds to a view what only observers are told: server jobs."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._feed = Feed(folder, FLEET, self._tell)
        self._view: FleetView | None = None
        self._job: dict[str, Any] | None = None

    def start(self, view: FleetView) -> None:
        """Begin to tell, as soon as somebody watches."""
        self._view = view
        self._feed.start()

    def stop(self) -> None:
        """Tell no more."""
        self._feed.stop()

    def server_job(self, name: str, round: int, step: int, steps: int) -> None:
        self._job = {"name": name, "round": round, "step": step, "steps": steps}

    def event(self, name: str, **fields: Any) -> None:
        if name == "server_job":
            self._job = None

    def _tell(self) -> tuple[Mapping[str, Any], bytes]:
        assert self._view is not None
        return {**self._view.facts(), "pid": os.getpid(), "job": self._job}, self._view.states(_CODES.__getitem__)
