"""The story of one device: what it holds, what it was asked, how that ended, and what it remembers."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedemu.algorithms.replay.buffer import Buffer
from fedemu.algorithms.streams.plan import StreamPlan
from fedemu.coordinator.fleet.columns import state_of
from fedemu.coordinator.record.records import newest_record
from fedemu.coordinator.record.run_directory import CONFIG
from fedemu.device.memory.replay_buffer import read_buffer
from fedemu.device.memory.store import PREFIX, SUFFIX
from fedemu.ops.assembly.behaviours import open_behaviours
from fedemu.ops.assembly.named_code import named_places
from fedemu.ops.data.apart import entry_here
from fedemu.ops.data.cache import read
from fedemu.ops.experiment import Experiment
from fedemu.ops.live.forms import is_ask, is_event
from fedemu.ops.live.run import LiveRun
from fedemu.ops.live.tail import backwards
from fedemu.protocol.code.own_code import account
from fedemu.protocol.errors import FedemuError
from fedemu.protocol.ids import AskId

MOST_VISITS: Final = 60
MOST_EVENTS: Final = 40
MOST_CLASSES: Final = 200


@dataclass(frozen=True)
class Holdings:
    """Which samples which device has, and the labels of all of them."""

    plan: StreamPlan
    labels: NDArray[np.int64]
    classes: tuple[str, ...]


class Stories:
    """Tells stories of devices. The data of an experiment are opened once, off the event loop.

    A run that somebody looks at may come from a stranger. So nothing of its data is decoded, and no code is run that
    its experiment names: stories tell of data that this machine's cache holds.
    """

    def __init__(self) -> None:
        self._holdings: dict[int, tuple[str, asyncio.Future[Holdings | str]]] = {}
        """By the number of the run: the digest of the experiment whose data these are, and the data."""

    async def of(self, run: LiveRun, device: int) -> dict[str, Any]:
        """The story of a device for the page."""
        digest, opening = self._holdings.get(run.number, ("", None))
        if opening is None or digest != run.experiment.digest:
            opening = asyncio.ensure_future(asyncio.to_thread(_open, run.experiment, run.directory))
            self._holdings[run.number] = run.experiment.digest, opening
        holdings = await asyncio.shield(opening)
        if isinstance(holdings, str):  # the next story tries again
            self._holdings.pop(run.number, None)
        return await asyncio.to_thread(_tell, run, device, holdings)


def _open(experiment: Experiment, directory: Path) -> Holdings | str:
    """The holdings of an experiment, or a sentence that says why they cannot be had."""
    try:
        corpus = read(entry_here(experiment))
        if corpus is None:
            validate = f"fedemu validate {shlex.quote(str(directory / CONFIG))}"
            code = ", and runs the code that the experiment names" if named_places(experiment) else ""
            return f"the data of the run are not in the cache of this machine; {validate} decodes them{code}"
        # It imports torch, for which no page should wait that tells no story.
        from fedemu.ops.assembly.parts import Parts

        return Holdings(Parts(experiment, corpus).stream, corpus.train.y, corpus.class_names)
    except Exception as error:  # flwr-datasets, which may divide the data, has errors of many kinds
        said = str(error) if isinstance(error, OSError) else account(error)
        return f"the data of the run can't be read here: {said}"


def _tell(run: LiveRun, device: int, holdings: Holdings | str) -> dict[str, Any]:
    told: dict[str, Any] = {
        "device": device,
        "visits": [*_visits(run.directory, device)],
        "events": [*_events(run.directory, device)],
        "profile": _profile(run, device),
        "machine": run.machine.process_of(device),
    }
    if isinstance(holdings, str):
        return {**told, "missing": holdings}
    counts = holdings.plan.arrivals.label_counts(holdings.labels, len(holdings.classes), device)
    told["classes"] = holdings.classes[:MOST_CLASSES]
    told["class_count"] = len(holdings.classes)
    told["labels"] = counts[:, :MOST_CLASSES].tolist()
    buffer = _buffer(run, device)
    if holdings.plan.budget:
        cells = np.zeros_like(counts)
        if buffer is not None and len(buffer):
            periods = buffer.periods.clip(0, len(counts) - 1)
            np.add.at(cells, (periods, holdings.labels[buffer.indices]), 1)
        kept = {"samples": int(cells.sum()), "kept": cells[:, :MOST_CLASSES].tolist()}
        told["replay"] = {"room": holdings.plan.budget, **kept}
    return told


def _visits(directory: Path, device: int) -> Iterator[dict[str, Any]]:
    """The last asks of a device, each with its outcome, the newest first."""
    asks = (ask for ask in backwards(directory / "asks.jsonl", is_ask) if device in (ask.get("devices") or []))
    for ask in islice(asks, MOST_VISITS):
        place = ask["devices"].index(device)
        times = ask.get("times") or []
        kept = {key: ask.get(key) for key in ("ask", "round", "attempt", "program", "start", "end")}
        outcome = str(ask.get("outcomes") or "")[place : place + 1]
        yield {**kept, "outcome": outcome, "time": times[place] if place < len(times) else None}


def _events(directory: Path, device: int) -> Iterator[dict[str, Any]]:
    """The last events of a device, the newest first."""
    events = (event for event in backwards(directory / "events.jsonl", is_event) if event.get("device") == device)
    return islice(events, MOST_EVENTS)


def _profile(run: LiveRun, device: int) -> dict[str, float | None]:
    """How fast the device is. Empty if the experiment lacks its traces."""
    try:
        profile = open_behaviours(run.experiment.to_bytes())(device).profile
    except FedemuError:
        return {}
    return {
        name: float(value)
        for name in ("seconds_per_sample", "down_kbps", "up_kbps", "latency")
        if isinstance(value := getattr(profile, name, None), int | float)
    }


def _buffer(run: LiveRun, device: int) -> Buffer | None:
    """The replay buffer in the version of the own state that counts, None if this machine does not have it."""
    record = newest_record(run.directory / "checkpoint") or {}
    version = state_of(record.get("roster") or {}, device)
    for state in [run.directory / "devices", *(folder.parent for folder in run.machine.folders)]:
        paths = {
            path.name[len(PREFIX) : -len(SUFFIX)]: path
            for path in state.glob(f"*/*/devices/{device}/{PREFIX}*{SUFFIX}")
        }
        if version in paths:
            return read_buffer(paths[version])
        if paths:
            return read_buffer(paths[max(paths, key=_order)])
    return None


def _order(version: str) -> tuple[int, ...]:
    try:
        ask = AskId.parse(version)
    except ValueError:
        return ()
    return (ask.round, ask.attempt, ask.ordinal)
