"""The same work by other simulators, by a plain loop, and by us, in turns: ``fedemu bench peers``."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fedemu.coordinator.record.row import read_rows
from fedemu.device.compute.environment import COMPUTE_ENVIRONMENT
from fedemu.ops.bench.measuring.measure import Effort, Spread, Tell
from fedemu.ops.bench.peers.environments import PEERS, Absent, environment
from fedemu.ops.bench.peers.observe import Observation, lines_of, observe
from fedemu.ops.bench.peers.work import CNN, DIGITS, Work, write
from fedemu.ops.figures import percent
from fedemu.protocol.code.source import interpreter

OURS: Final = {
    "plain": "a plain PyTorch loop",
    "trainer": "fedemu, the trainer alone",
    "system": "fedemu, whole system",
}
"""The sides that need no environment of their own."""
WORKS: Final = (DIGITS, CNN)
_LEAST_ROUNDS: Final = 3
_APPS: Final = Path(__file__).parent / "apps"

EXPLANATION: Final = (
    "CPU counts all processes of a side. The first round counts from the start of the command, with all imports. "
    "Memory is the most that all processes of a side hold together. The loop, pfl-research and our trainer use one "
    "thread in one process; Flower, FedJAX and our whole system use all cores."
)


@dataclass(frozen=True)
class Standing:
    """What a side reached in one work, over all repetitions. ``accuracy`` is that of the last repetition."""

    work: str
    side: str
    updates_per_second: Spread
    cpu_ms: Spread
    peak_megabytes: Spread
    first_round: Spread
    accuracy: float | None


@dataclass(frozen=True)
class Comparison:
    """All sides, and why those that are ``absent`` were left out."""

    standings: list[Standing]
    absent: Mapping[str, str]

    def table(self) -> dict[str, Any]:
        """The comparison for JSON."""
        return asdict(self)

    def __rich_console__(self, console: Console, options: Any) -> Iterator[Group]:
        for work in dict.fromkeys(each.work for each in self.standings):
            drawn = Table(title=work, title_justify="left", box=None, pad_edge=False)
            for column in ("side", "updates/s", "from-to", "CPU per update", "peak memory", "first round", "accuracy"):
                drawn.add_column(column, justify="left" if column == "side" else "right")
            for each in self.standings:
                if each.work == work:
                    rate = each.updates_per_second
                    drawn.add_row(
                        each.side,
                        f"{rate.median:,.1f}",
                        f"{rate.least:,.1f}-{rate.most:,.1f}",
                        f"{each.cpu_ms.median:,.2f} ms",
                        f"{each.peak_megabytes.median:,.0f} MB",
                        f"{each.first_round.median:.1f} s",
                        "" if each.accuracy is None else percent(each.accuracy),
                    )
            yield Group(drawn, "")
        for title, why in self.absent.items():
            yield Group(Text(f"left out: {title}: {why}"))
        yield Group(EXPLANATION)


def compare(
    effort: Effort,
    folder: Path,
    tell: Tell,
    sides: Collection[str] = (*OURS, *PEERS),
    works: Sequence[Work] = WORKS,
    device: str = "cpu",
) -> Iterator[Comparison]:
    """Let all ``sides`` do all works, in turns. What they have reached so far, after each time that one did one.

    ``folder`` holds the environments of the other simulators. Only the loop, our trainer and pfl-research compute on
    another ``device`` than the processor.
    """
    absent: dict[str, str] = {}
    pythons: dict[str, Path] = {}
    titles = {name: title for name, title in OURS.items() if name in sides}
    for name in (name for name in PEERS if name in sides):
        peer = PEERS[name]
        tell(f"peers: the environment of {peer.title} in {folder / name}")
        try:
            pythons[name], version = environment(name, folder)
            titles[name] = f"{peer.title} {version}"
        except Absent as reason:
            absent[peer.title] = str(reason)
    done: list[Standing] = []
    yield Comparison(done, absent)
    with tempfile.TemporaryDirectory(prefix="fedemu-bench-") as scratch:
        for work in works:
            race = _Race(work, max(_LEAST_ROUNDS, effort.count(work.rounds)), Path(scratch), pythons, device)
            seen = defaultdict(list)
            standings: list[Standing] = []
            for number in range(max(1, effort.pairs - 2)):
                for name in list(titles)[:: -1 if number % 2 else 1]:
                    tell(f"peers: {work.title}: {titles[name]}")
                    try:
                        seen[name].append(race.run(name, number))
                    except Absent as reason:
                        absent[titles.pop(name)] = str(reason)
                    standings = [race.standing(titles[each], seen[each]) for each in titles if seen[each]]
                    yield Comparison([*done, *standings], absent)
            done = [*done, *standings]


class _Race:
    """One work, whose file is written once."""

    def __init__(
        self, work: Work, rounds: int, scratch: Path, pythons: Mapping[str, Path], device: str = "cpu"
    ) -> None:
        self._work, self._rounds, self._pythons, self._device = work, rounds, pythons, device
        self._scratch = scratch / work.model
        self._scratch.mkdir()
        self._file = self._scratch / "work.npz"
        self._per_round = write(work, rounds, self._file, device)

    def run(self, name: str, number: int) -> Observation:
        """One side at this work. Raises Absent if it fails."""
        progress = self._scratch / f"{name}-{number}"
        paths = [str(self._file), str(progress)]
        watched = partial(observe, done=lines_of(progress), last=self._rounds)
        if name == "plain":
            return watched([*interpreter(), "-m", "fedemu.ops.bench.peers.own", name, *paths], os.environ)
        if name == "trainer":
            return watched(
                [*interpreter(), "-m", "fedemu.ops.bench.peers.own", name, *paths], os.environ | COMPUTE_ENVIRONMENT
            )
        if name == "system":
            # The processes of a run end after the last round, so it makes one round more than is measured.
            settings = [f"--set={each}" for each in (*self._work.overrides, f"rounds={self._rounds + 1}")]
            run = [*interpreter(), "-m", "fedemu.ops.cli", "run", self._work.preset, "--out", str(progress), *settings]
            seen = watched(run, os.environ, done=lines_of(progress / "metrics.jsonl"))
            return replace(seen, accuracy=read_rows(progress)[-1].accuracy)
        # With -P no file of ``apps`` can stand in for a library.
        variables = _bare() | {"PFL_PYTORCH_DEVICE": self._device}
        return watched([str(self._pythons[name]), "-P", str(_APPS / PEERS[name].app), *paths], variables)

    def standing(self, title: str, seen: list[Observation]) -> Standing:
        """What the repetitions of a side come to."""
        updates = [each.rounds * self._per_round for each in seen]
        return Standing(
            self._work.title,
            title,
            Spread.of(count / each.wall for count, each in zip(updates, seen, strict=True)),
            Spread.of(1000 * each.cpu / count for count, each in zip(updates, seen, strict=True)),
            Spread.of(each.peak for each in seen),
            Spread.of(each.first for each in seen),
            seen[-1].accuracy if self._work is DIGITS else None,
        )


def _bare() -> dict[str, str]:
    """The environment variables without those that lead Python to fedemu's own packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
