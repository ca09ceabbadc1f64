"""The power fails at any moment of a run: what the disk has taken is enough to end with the same model."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedemu.coordinator.plan import CoordinatorPlan
from fedemu.coordinator.record.run import Run
from fedemu.coordinator.record.run_directory import claim_folder
from fedemu.coordinator.record.summary import Summary
from fedemu.protocol.host.files import write_whole
from fedemu.protocol.transport.memory import MemoryNetwork

MakePlan = Callable[..., CoordinatorPlan]
MakeFleet = Callable[..., Any]
Play = Callable[[CoordinatorPlan], Awaitable[tuple[Summary, Run]]]
Tree = dict[str, "bytes | Tree"]


class Disk:
    """A disk that holds no more than it must: the bytes of a file, and the names in a folder, as of their last fsync.

    ``moments`` are what a power failure would leave of the folder ``top`` after each of these.
    """

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.top = top
        self.moments: list[Tree] = []
        self._files: dict[int, bytes] = {}
        self._folders: dict[int, dict[str, tuple[int, bool]]] = {}
        self._held: list[int] = []
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        found = os.fstat(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}")
        if stat.S_ISDIR(found.st_mode):
            self._folders[found.st_ino] = {
                each.name: (each.inode(), each.is_dir(follow_symlinks=False)) for each in os.scandir(path.readlink())
            }
        else:
            self._held.append(os.open(path, os.O_RDONLY))  # so that no other file gets its number
            self._files[found.st_ino] = path.read_bytes()
        self.moments.append(self._tree(self.top.stat().st_ino))

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)

    def _tree(self, number: int) -> Tree:
        return {
            name: self._tree(each) if is_folder else self._files.get(each, b"")
            for name, (each, is_folder) in self._folders.get(number, {}).items()
        }


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    top = tmp_path / "disk"
    top.mkdir()
    disk = Disk(top, monkeypatch)
    yield disk
    disk.close()


def lay(tree: Tree, folder: Path) -> None:
    """Make the folder and what is in it."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            lay(content, folder / name)


def script(index: int, work: Any) -> Any:
    return {"after": 10.0 + (7 * index + 3 * int(work.ask.split(".")[0])) % 11}


async def test_after_a_power_failure_at_any_moment_the_run_ends_with_the_same_model(
    make_plan: MakePlan, make_fleet: MakeFleet, play: Play, disk: Disk, tmp_path: Path
) -> None:
    folder = disk.top / "run"
    claim_folder(folder)
    write_whole(folder / "config.toml", "", durable=True)
    network = MemoryNetwork()
    make_fleet(6, script=script, network=network)
    summary, _ = await play(make_plan("disk/run", network=network, rounds=3))
    seen: set[str] = set()
    began = 0
    for number, tree in enumerate(list(disk.moments)):
        left = tree.get("run")
        assert isinstance(left, dict) or not number, "the folder of the run itself is lost"
        if not isinstance(left, dict) or "config.toml" not in left or repr(left) in seen:
            continue
        seen.add(repr(left))
        lay(left, cut := tmp_path / f"cut-{number}")
        again = MemoryNetwork()
        journal = cut / "checkpoint" / "leases.jsonl"
        text = journal.read_text() if journal.is_file() else ""
        lease = json.loads(text[: text.rindex("}") + 1])["grant"] if "}" in text else None
        fleet = make_fleet(6, script=script, network=again, lease=lease)
        resumed, run = await play(make_plan(f"cut-{number}", network=again, rounds=3))
        await fleet.close()
        began = max(began, next((event["round"] for event in run.named("resume")), 0))
        assert (resumed.model_digest, resumed.perturbed) == (summary.model_digest, False), f"moment {number}"
    assert began >= 3, "it went on from checkpoints"
