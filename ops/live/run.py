"""One run as the page shows it: everything that its directory tells, followed as it grows."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from fedemu.coordinator.record.data_file import DATA, read_class_names
from fedemu.coordinator.record.holder import UNNAMED, holder_of
from fedemu.coordinator.record.json_lines import object_in
from fedemu.coordinator.record.outcome import outcome_of
from fedemu.coordinator.record.run_directory import CONFIG
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import read_frozen
from fedemu.ops.live.devices import Devices
from fedemu.ops.live.forms import is_account, is_ask, is_event, is_row
from fedemu.ops.live.machine import Machine
from fedemu.ops.live.resuming import Resuming
from fedemu.ops.live.rows import MOST_POINTS, Rows
from fedemu.ops.live.stream import Stream
from fedemu.ops.live.tail import Tail
from fedemu.ops.watching.feed import FLEET, LIVE, read_feed, watch
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host.paths import is_file
from fedemu.protocol.wording import counted

KEPT_EVENTS: Final = 1000
"""The number of last events that a viewer who comes new is given."""
KEPT_ASKS: Final = 24
MOST_ASKED: Final = 400
"""The most devices of one ask that the page gets one by one."""
MOST_NAMES: Final = 1000
"""The number of classes whose names the page gets."""
FRESH_SECONDS: Final = 4.0
"""An account of the coordinator that is older than this is not believed any more."""
_GATHERS: Final = {"resume": True, "fleet_complete": False, "fleet_incomplete": False}
"""The events between which a coordinator waits for the fleet before it goes on with a run."""


class LiveRun:
    """A run directory. ``look`` reads what is new in it, and tells the viewers of ``stream``.

    ``number`` is its place on the page. ``is_starting`` says that a command has begun which will start the coordinator.
    Raises ConfigurationError if the directory holds no run.
    """

    def __init__(self, number: int, directory: Path, stream: Stream, is_starting: bool = False) -> None:
        self.number = number
        self.directory = directory
        self.is_starting = is_starting
        self.experiment: Experiment = read_frozen(directory)
        self._frozen_at = self._changed(CONFIG)
        self._described_at: int | None = None
        self.class_names: tuple[str, ...] = ()
        """The names of the classes by number, of the first of them. Empty as long as the run does not tell them."""
        self.stream = stream
        self._messages = 0
        self.machine = Machine(directory)
        self.resuming = Resuming(directory)
        """The command that goes on with the run."""
        self.is_behind = False
        """Whether the last look left lines of the logs unread, so that another one should follow soon."""
        self._is_anew = False
        """Whether the viewers have to be told everything again."""
        self._begin()

    def _begin(self) -> None:
        forms = {"metrics": is_row, "events": is_event, "asks": is_ask}
        self._logs = {log: Tail(self.directory / f"{log}.jsonl", form) for log, form in forms.items()}
        self._unread: Counter[str] = Counter()
        self.devices = Devices(self.experiment.fleet.devices, self.experiment.clock.kind == "virtual")
        self._rows = Rows()
        self._log: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self._counted = 0
        self._kinds: Counter[str] = Counter()
        """How often each event came in the whole run."""
        self._gathers = False
        """Whether a coordinator that goes on with the run waits for the fleet, by the events."""
        self._asked: deque[dict[str, Any]] = deque(maxlen=KEPT_ASKS)
        self._status: dict[str, Any] = {}
        self._summary: tuple[float, dict[str, Any]] | None = None

    def look(self) -> None:
        """Read what is new, or a part of it if it is much. Viewers are told as soon as all of it is read.

        They get everything again if the run was resumed from an earlier round or got more rounds, if very much has come
        at once, or after a look that was broken off by an OSError of the system.
        """
        self._mark()
        self.note()
        message = self._read()
        is_anew = self._is_anew
        # Whoever watches lacks what was read until this look has told it. The system may refuse the rest of the look.
        self._is_anew = True
        if self.is_behind:
            return
        feed, states = self._account()
        self.devices.reached(max(_times(feed, self._rows.last, "virtual_time"), default=0.0))
        self.devices.told(states)
        self.machine.look(self.coordinator)
        self.devices.frozen = self.machine.frozen_devices()
        if fleet := self.devices.changes():
            message["fleet"] = fleet
        status = self._status_of(feed)
        if status != self._status:
            self._status = status
            message["status"] = status
        if machine := self.machine.sample():
            message["machine"] = machine
        if message or is_anew:
            self._messages += 1
            told = self.snapshot() if is_anew else {"number": self.number, "message": self._messages, **message}
            self.stream.add("snapshot" if is_anew else "tick", told)
        self._is_anew = False

    def _read(self) -> dict[str, Any]:
        """Read the next part of the files of the run. Returns what it tells viewers."""
        looks = {log: tail.look() for log, tail in self._logs.items()}
        frozen_at = self._changed(CONFIG)
        anew = any(look.anew for look in looks.values()) or frozen_at not in (None, self._frozen_at)
        if anew:
            frozen, self._frozen_at = self.devices.frozen, frozen_at
            with suppress(Exception):  # a folder that is gone keeps its last experiment
                self.experiment = read_frozen(self.directory)
            self._begin()
            self.devices.frozen = frozen
            looks = {log: tail.look() for log, tail in self._logs.items()}
        self.is_behind = any(look.full for look in looks.values())
        described_at = self._changed(DATA)
        if described_at not in (None, self._described_at):
            self._described_at, self.class_names = described_at, read_class_names(self.directory)[:MOST_NAMES]
            anew = True
        self._is_anew = self._is_anew or anew
        self._unread.update({log: look.unread for log, look in looks.items()})
        rows, events, asks = (look.lines for look in looks.values())
        message: dict[str, Any] = {}
        if rows := [self._rows.add(line) for line in rows]:
            message["rows"] = rows
            self._is_anew = self._is_anew or len(rows) > MOST_POINTS
        for event in events:
            self.devices.happened(event)
            self._counted += 1
            self._kinds[event["event"]] += 1
            self._gathers = _GATHERS.get(event["event"], self._gathers)
            self._log.append({"n": self._counted, **event})
        if events:
            message["events"] = list(self._log)[-len(events) :]
            message["kinds"] = dict(self._kinds)
        for ask in asks:
            self.devices.asked(ask)
            self._asked.append(_shortened(ask))
        if asks:
            message["asks"] = list(self._asked)[-len(asks) :]
            message["visited"] = [device for ask in asks for device in ask.get("devices") or ()]
        return message

    def note(self) -> None:
        """Notice that a coordinator has come."""
        coordinator = self.coordinator
        self.resuming.note(coordinator)
        self.is_starting = self.is_starting and coordinator is None

    @property
    def coordinator(self) -> int | None:
        """The process that holds the lock of the run directory, None if none does, ``UNNAMED`` if it is not here."""
        return holder_of(self.directory / ".lock")

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``. Empty if the run is not over."""
        path = self.directory / "summary.json"
        try:
            changed = path.stat().st_mtime
            if self._summary is None or self._summary[0] != changed:
                self._summary = changed, object_in(path.read_bytes()) or {}
        except OSError:
            return {}
        return self._summary[1]

    def resume(self) -> str:
        """Start the command that goes on with the run, and say so. Raises FedemuError if it can't be started."""
        if self.coordinator is not None or self.resuming.is_under_way:
            raise ConfigurationError("the run goes on already")
        if self.is_starting:
            raise ConfigurationError("the command that serves this page is starting the run")
        return self.resuming.start()

    def snapshot(self) -> dict[str, Any]:
        """Everything, for a viewer who comes new. Messages up to ``message`` hold nothing else."""
        return {
            "run": self.about(),
            "message": self._messages,
            "settings": _flat(self.experiment.table()),
            "rows": self._rows.thinned(),
            "events": list(self._log),
            "kinds": dict(self._kinds),
            "asks": list(self._asked),
            "fleet": self.devices.whole(),
            "status": self._status,
            "machine": self.machine.history(),
        }

    def about(self) -> dict[str, Any]:
        """What the run is."""
        experiment = self.experiment
        return {
            "number": self.number,
            "name": experiment.name,
            "directory": str(self.directory),
            "digest": experiment.digest,
            "devices": experiment.fleet.devices,
            "rounds": experiment.rounds,
            "seed": experiment.seed,
            "virtual": experiment.clock.kind == "virtual",
            "periods": experiment.stream.period_count,
            "classes": self.class_names,
        }

    def _changed(self, name: str) -> int | None:
        """When a file of the directory was written. None if it is not there."""
        with suppress(OSError):
            return (self.directory / name).stat().st_mtime_ns
        return None

    def _mark(self) -> None:
        """Have the processes of the run tell what they do. A run that is over is not touched."""
        if self.coordinator is not None:
            with suppress(OSError):
                watch(self.directory / LIVE)
                for folder in self.machine.folders:
                    watch(folder)

    def _account(self) -> tuple[dict[str, Any], bytes]:
        """The coordinator's own account of the run and of its devices. Empty unless it is fresh and of this form."""
        path = self.directory / LIVE / FLEET
        try:
            if time.time() - path.stat().st_mtime > FRESH_SECONDS:
                return {}, b""
        except OSError:
            return {}, b""
        feed = read_feed(path)
        if feed is None or self.coordinator not in (feed[0].get("pid"), UNNAMED) or not is_account(feed[0]):
            return {}, b""
        return feed

    def _left_out(self) -> str:
        """Which lines the page does not show. Empty if it shows all."""
        logs = " and ".join(f"{log}.jsonl" for log, lines in self._unread.items() if lines)
        lines = counted(self._unread.total(), "line")
        return f"{lines} of {logs} left out, not of the form of this version" if logs else ""

    def _status_of(self, feed: dict[str, Any]) -> dict[str, Any]:
        row, summary, totals = self._rows.last, self.summary, self._rows.totals
        rounds = int(row.get("round") or 0)
        absence = feed.get("absence")
        if self.coordinator is not None:
            waits = (absence or self._gathers or not rounds) and not (feed.get("ask") or feed.get("job"))
            state = "waiting" if waits else "running"
        elif self.is_starting:
            state = "starting"
        elif self.resuming.is_starting:
            state = "resuming"
        else:
            without = "stopped" if is_file(self.directory / CONFIG) else "gone"
            state = outcome_of(summary, rounds, self.experiment.rounds) or without
        is_at_pace = state == "running" and not absence
        seconds = totals.get("round_seconds", 0.0)
        # The coordinator's account is up to seconds old. Meanwhile the log may have told the end of its ask.
        ask = feed.get("ask") or {}
        is_over = any(one["ask"] == ask.get("ask") for one in self._asked)
        return {
            "state": state,
            "round": rounds,
            "task": row.get("task"),
            "best": self._rows.best,
            "digest": summary.get("model_digest"),
            "perturbed": bool(summary.get("perturbed")),
            "unread": self._left_out(),
            "virtual_time": max(_times(feed, row, "virtual_time"), default=None),
            "wall_time": max(_times(feed, row, "wall_time"), default=None),
            "updates": totals.get("accepted", 0),
            "updates_per_second": totals.get("accepted", 0) / seconds if seconds else None,
            "seconds_left": _left(self._rows, self.experiment.rounds) if is_at_pace else None,
            "counts": feed.get("counts"),
            "ask": None if is_over else feed.get("ask"),
            "absence": absence,
            "job": feed.get("job"),
            "coordinator": self.coordinator,
            "resume": self.resuming.command,
            "failure": "" if self.coordinator is not None else self.resuming.failure,
        }


def _left(rows: Rows, wanted: int) -> float | None:
    """The real seconds until the last of the ``wanted`` rounds, at the pace of the last ten. None before the first."""
    last = [row["round_seconds"] or 0.0 for row in rows.latest]
    return sum(last) / len(last) * max(0, wanted - int(rows.last["round"] or 0)) if last else None


def _times(feed: Mapping[str, Any], row: Mapping[str, Any], name: str) -> list[float]:
    """What the coordinator's account and the last row tell of a time, each if it does. Either may be the newer one."""
    return [float(told[name]) for told in (feed, row) if told.get(name) is not None]


def _shortened(ask: dict[str, Any]) -> dict[str, Any]:
    """An ask for the page. Of a very large cohort the first devices stand for all, and the counts are kept."""
    devices, outcomes = ask.get("devices") or [], str(ask.get("outcomes") or "")
    kept = {key: ask.get(key) for key in ("ask", "round", "attempt", "program", "start", "end", "wanted")}
    return {
        **kept,
        "asked": len(devices),
        "counts": {letter: outcomes.count(letter) for letter in sorted(set(outcomes))},
        "devices": devices[:MOST_ASKED],
        "outcomes": outcomes[:MOST_ASKED],
        "times": (ask.get("times") or [])[:MOST_ASKED],
    }


def _flat(table: Any, before: str = "") -> list[tuple[str, str]]:
    """The settings of a table as pairs of a dotted key and a value as TOML writes it."""
    found: list[tuple[str, str]] = []
    for key, value in table.items():
        name = f"{before}{key}"
        if isinstance(value, dict):
            found += _flat(value, f"{name}.")
        else:
            found.append((name, value if isinstance(value, str) else json.dumps(value, default=str)))
    return found
