"""The zygote with real forks: it reports every death, and no process outlives it."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedemu.device.bus import TO_SUPERVISOR, Attach, Quit
from fedemu.device.machine import processes
from fedemu.device.machine.forkers import ForkingProcess
from fedemu.device.machine.lease import LIFE_BITS
from fedemu.device.machine.observer import MachineObserver
from fedemu.device.machine.processes import DeviceProcesses
from fedemu.device.pipe import Setup
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.transport.interface import Router
from fedemu.protocol.transport.zeromq import ZmqNetwork

pytestmark = pytest.mark.usefixtures("started_warm")

TOYS = Path(__file__).parents[1] / "toys.py"
DEVICES = 9
Until = Callable[..., Coroutine[Any, Any, None]]
Family = Callable[[], list[psutil.Process]]
FIRST = 1 << LIFE_BITS


class Nursery:
    """Device processes whose bus only listens, and whose coordinator does not exist."""

    def __init__(
        self, zygote: ForkingProcess, folder: Path, experiment: dict[str, object], stream: bytes, per_process: int
    ) -> None:
        self.network = ZmqNetwork()
        self.attached: dict[int, bytes] = {}
        self.deaths: list[tuple[int, int]] = []
        self.failures: list[FedemuError] = []
        self.router: Router = self.network.bind(
            "tcp://127.0.0.1:*", TO_SUPERVISOR, self._received, lambda peer, error: None
        )
        store = BlobStore(folder / "blobs")
        self.processes = DeviceProcesses(
            zygote,
            Setup(
                coordinator="ipc://@nobody-there",
                bus=self.router.address,
                token="token",
                lease="lease",
                heartbeat_seconds=2.0,
                patience=5,
                behaviours=f"{TOYS}:open_behaviours",
                experiment=str(store.path(store.put(json.dumps(experiment).encode()))),
                partition=str(store.path(store.put(stream))),
                devices=str(folder / "devices"),
                logs=str(folder),
            ),
            list(range(DEVICES)),
            per_process,
            FIRST,
            MachineObserver(),
            died=lambda device, incarnation: self.deaths.append((device, incarnation)),
            process_ended=lambda number: None,
            failed=self.failures.append,
        )

    def _received(self, peer: bytes, envelope: object) -> None:
        message = envelope.message  # type: ignore[attr-defined]
        if isinstance(message, Attach):
            self.attached[message.number] = peer

    def are_there(self, count: int) -> bool:
        """Whether so many processes have attached, and the zygote has told of them, which comes on another line."""
        return len(self.attached) == len(self.processes._pids) == count

    def quit(self) -> None:
        for peer in self.attached.values():
            self.router.send(peer, Quit())


MakeNursery = Callable[..., Coroutine[Any, Any, Nursery]]


@pytest.fixture
async def nursery(tmp_path: Path, toy_stream: Callable[[int], bytes], family: Family) -> AsyncIterator[MakeNursery]:
    """Makes nurseries. At the end none of their processes may live."""
    made: list[Nursery] = []

    async def make(experiment: dict[str, object] | None = None, per_process: int = 1) -> Nursery:
        zygote = await processes.start_zygote()
        made.append(Nursery(zygote, tmp_path, experiment or {}, toy_stream(DEVICES), per_process))
        return made[-1]

    yield make
    for nursery in made:
        members = family()
        await nursery.processes.stop(None, 0.0)
        nursery.network.close()
        _, alive = psutil.wait_procs(members, timeout=60)
        assert alive == []


async def test_every_process_attaches_with_its_number(nursery: MakeNursery, until: Until) -> None:
    place = await nursery()
    await place.processes.prepare()
    place.processes.launch()
    await until(lambda: place.are_there(DEVICES), "attachment of all")
    names = {psutil.Process(pid).name() for pid in place.processes._pids.values()}
    assert names == {"fedemu-device"}
    assert sorted(place.attached) == list(range(DEVICES))


async def test_several_devices_share_a_process(nursery: MakeNursery, until: Until) -> None:
    place = await nursery(per_process=4)
    await place.processes.prepare()
    place.processes.launch()
    await until(lambda: place.are_there(3), "attachment of all")
    assert len(place.processes) == len(place.processes._pids) == 3


async def test_a_killed_process_is_reported_at_once_and_started_again(nursery: MakeNursery, until: Until) -> None:
    place = await nursery()
    await place.processes.prepare()
    place.processes.launch()
    await until(lambda: place.are_there(DEVICES), "attachment of all")
    place.processes.joined(7, FIRST + 18)
    victim = place.processes._pids[7]
    first_peer = place.attached[7]
    os.kill(victim, signal.SIGKILL)
    await until(lambda: place.attached[7] != first_peer, "the next life")
    assert place.deaths == [(7, FIRST + 18)]
    await until(lambda: place.are_there(DEVICES), "the zygote's word")
    assert place.processes._pids[7] != victim


async def test_no_process_outlives_a_killed_zygote_and_all_are_started_again(
    nursery: MakeNursery, until: Until
) -> None:
    place = await nursery()
    await place.processes.prepare()
    place.processes.launch()
    await until(lambda: place.are_there(DEVICES), "attachment of all")
    first_peers = dict(place.attached)
    family = [psutil.Process(pid) for pid in place.processes._pids.values()]
    (zygote,) = {process.ppid() for process in family}
    os.kill(zygote, signal.SIGKILL)
    await until(lambda: all(place.attached[n] != first_peers[n] for n in first_peers), "the next lives")
    _, alive = psutil.wait_procs(family, timeout=60)
    assert alive == []
    assert sorted(device for device, _ in place.deaths) == list(range(DEVICES))


async def test_a_zygote_that_is_killed_while_it_starts_is_started_again(nursery: MakeNursery, until: Until) -> None:
    place = await nursery()
    ready = asyncio.ensure_future(place.processes.prepare())
    for _ in range(2):
        killed = place.processes.zygote
        os.kill(killed, signal.SIGKILL)
        await until(lambda killed=killed: place.processes.zygote != killed, "the next zygote")
    await ready
    place.processes.launch()
    await until(lambda: place.are_there(DEVICES), "attachment of all")
    assert place.failures == []


@pytest.mark.parametrize("ready", [False, True])
async def test_a_machine_that_can_start_no_process_any_more_says_so(
    nursery: MakeNursery, until: Until, monkeypatch: pytest.MonkeyPatch, ready: bool
) -> None:
    place = await nursery()
    preparing = asyncio.ensure_future(place.processes.prepare())
    if ready:
        await preparing

    async def refuse(*command: object, **settings: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    os.kill(place.processes.zygote, signal.SIGKILL)
    sentence = (
        "no process can be started on this machine: "
        "the limit of processes is reached; raise it (ulimit -u, or pids.max of the container)"
    )
    if ready:
        await until(lambda: place.failures, "a failure")
        assert [str(failure) for failure in place.failures] == [sentence]
    else:
        with pytest.raises(FedemuError, match=re.escape(sentence)):
            await preparing


async def test_a_zygote_that_is_always_killed_is_given_up(
    nursery: MakeNursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "COMMAND", ("-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(ConfigurationError, match="No device process can be started: the zygote was ended by SIGKILL"):
        await (await nursery()).processes.prepare()


async def test_a_process_that_is_about_to_be_started_again_has_one_next_life_if_the_zygote_dies_meanwhile(
    nursery: MakeNursery, until: Until
) -> None:
    place = await nursery()
    await place.processes.prepare()
    place.processes.launch()
    await until(lambda: place.are_there(DEVICES), "attachment of all")
    first_peers, zygote = dict(place.attached), place.processes.zygote
    # It has never joined, so it is started again after a pause, in which the next zygote is imported.
    os.kill(place.processes._pids[7], signal.SIGTERM)
    await until(lambda: place.deaths, "the death of device 7")
    os.kill(zygote, signal.SIGKILL)
    await until(lambda: all(place.attached[number] != peer for number, peer in first_peers.items()), "the next lives")
    assert len(psutil.Process(place.processes.zygote).children()) == DEVICES


FULL = """
import errno, os, sys
from fedemu.device.process.zygote import main

fork, refusals = os.fork, iter(range({}))

def fork_if_there_is_room():
    for _ in refusals:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
    return fork()

os.fork = fork_if_there_is_room
main(sys.argv[1:])
"""
"""A zygote that the system refuses its first forks."""


async def test_processes_that_the_system_does_not_let_start_are_tried_again_and_the_others_live_on(
    nursery: MakeNursery, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "COMMAND", ("-c", FULL.format(3)))
    place = await nursery()
    await place.processes.prepare()
    zygote = place.processes.zygote
    place.processes.launch()
    await until(lambda: place.are_there(DEVICES), "attachment of all")
    assert (place.processes.zygote, place.deaths, place.failures) == (zygote, [], [])


async def test_a_machine_whose_limit_of_processes_stays_reached_says_so(
    nursery: MakeNursery, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "COMMAND", ("-c", FULL.format(100)))
    monkeypatch.setattr(processes, "MOST_FAILURES", 2)
    place = await nursery()
    await place.processes.prepare()
    place.processes.launch()
    await until(lambda: place.failures, "giving up")
    assert str(place.failures[0]) == (
        "Device process 0 failed 2 times in a row; at last it could not be started: "
        "the limit of processes is reached; raise it (ulimit -u, or pids.max of the container)."
    )


async def test_everything_ends_when_the_pipe_closes_also_what_has_heard_no_farewell(
    nursery: MakeNursery, until: Until, family: Family, caplog: pytest.LogCaptureFixture
) -> None:
    place = await nursery()
    await place.processes.prepare()
    place.processes.launch()
    await until(lambda: place.are_there(DEVICES), "attachment of all")
    members = family()
    assert len(members) == DEVICES + 1
    await place.processes.stop(lambda: None, 0.05)
    assert caplog.messages == ["9 device processes did not end in time; they are killed"]
    _, alive = psutil.wait_procs(members, timeout=60)
    assert alive == []


async def test_processes_that_are_asked_to_quit_end_by_themselves_and_each_end_looks_at_no_other(
    nursery: MakeNursery, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    class Watched(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            looks.append(len(self))
            return super().__iter__()

    place = await nursery()
    await place.processes.prepare()
    place.processes.launch()
    await until(lambda: place.are_there(DEVICES), "attachment of all")
    monkeypatch.setattr(place.processes, "_processes", Watched(place.processes._processes))
    await place.processes.stop(place.quit, 10.0)
    assert (place.processes._pids, looks) == ({}, [])
    assert place.deaths == []


async def test_behaviours_load_no_code_that_the_experiment_names_and_the_machine_does_not_allow(
    nursery: MakeNursery,
) -> None:
    place = await nursery({"named": "strange:code"})
    with pytest.raises(ConfigurationError, match="names code that does not come with fedemu, strange, and"):
        await place.processes.prepare()


async def test_behaviours_that_cannot_be_opened_are_told_in_one_sentence(nursery: MakeNursery) -> None:
    place = await nursery({"broken_behaviours": True})
    with pytest.raises(ConfigurationError, match=r"^These behaviours can't be opened\.$"):
        await place.processes.prepare()


async def test_an_experiment_that_cannot_be_read_is_told_in_one_sentence(
    nursery: MakeNursery, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place = await nursery()
    for blob in (tmp_path / "blobs").iterdir():
        blob.unlink()
    with pytest.raises(ConfigurationError, match=r"blobs/\w+ cannot be read: No such file or directory$"):
        await place.processes.prepare()
    assert "Traceback" not in capfd.readouterr().err


async def test_a_process_that_never_comes_right_is_given_up_with_its_log(
    nursery: MakeNursery, until: Until, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedemu.device.machine.processes.MOST_FAILURES", 2)
    place = await nursery({"cursed": [3]})
    await place.processes.prepare()
    place.processes.launch()
    await until(lambda: bool(place.failures), "giving up")
    assert "Device process 3 failed 2 times in a row; at last it ended with code 1; see " in str(place.failures[0])
    assert "ValueError: cursed" in (tmp_path / "device-3.log").read_text()
