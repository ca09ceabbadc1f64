"""A supervisor with real processes and a scripted coordinator: whole rounds, the death of each process, and the end."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fedemu.device.bus import Attach
from fedemu.device.host.limits import FILES_PER_DEVICE
from fedemu.device.machine import supervisor
from fedemu.device.machine.broker import Broker
from fedemu.device.machine.forkers import ForkingProcess
from fedemu.device.machine.lease import LIFE_BITS
from fedemu.device.machine.observer import MachineObserver
from fedemu.device.machine.processes import start_zygote
from fedemu.device.machine.supervisor import SupervisorPlan, supervise
from fedemu.protocol.blobs.tree_file import encode_tree
from fedemu.protocol.errors import ConfigurationError, DataError, RefusedError, UnreachableError
from fedemu.protocol.host.open_files import open_files
from fedemu.protocol.messages import Bye, Died, Enroll, Failed, Need, Stop
from fedemu.protocol.transport.direct_router import DirectRouter

pytestmark = pytest.mark.usefixtures("leaves_nothing")

FIRST = 1 << LIFE_BITS


def expected(device: int, round: int, own: float = 0.0, weight: float = 0.0) -> float:
    """The result of a toy trainer for the two samples of a device."""
    return weight + (4 * device + 1) + 1000 * device + round + own


def named(name: str) -> list[psutil.Process]:
    """The living descendants of this process that have this name."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.name() == name:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@asynccontextmanager
async def supervising(plan: SupervisorPlan) -> AsyncIterator[asyncio.Task[str]]:
    """A supervisor in this process, cancelled at the end if it still runs."""
    task = asyncio.get_running_loop().create_task(supervise(plan))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ended(task: asyncio.Task[str], seconds: float = 60.0) -> str:
    return await asyncio.wait_for(task, seconds)


class Heard(MachineObserver):
    """An observer that notes what it is told of places and of the coordinator."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def placed(self, places: int) -> None:
        self.told.append(f"placed {places}")

    def lost(self, seconds: float) -> None:
        self.told.append("lost" if 0 <= seconds <= 20 else f"lost {seconds}")

    def found(self) -> None:
        self.told.append("found")

    def hung(self, trainer: int, seconds: float, lacked: str, jobs: str) -> None:
        self.told.append(f"trainer {trainer} {lacked} for {seconds:g} s: {jobs}")


async def test_a_round_goes_all_the_way_and_stop_ends_it(coordinator: Any, plan: Any) -> None:
    server = coordinator()
    async with supervising(plan(server.address)) as task:
        await server.everyone()
        assert await server.hold(1, range(6), weight=0.5) == {d: expected(d, 1, weight=0.5) for d in range(6)}
        second = await server.hold(2, (1, 4), weight=0.5)
        assert second == {d: expected(d, 2, own=expected(d, 1, weight=0.5), weight=0.5) for d in (1, 4)}
        server.stop()
        await ended(task)
    assert sorted(server.incarnations) == list(range(6))
    assert all(lives == [FIRST + 16] for lives in server.incarnations.values())
    assert len(server.heard_of(Enroll)) == 1
    assert server.heard_of(Died) == []
    asked = [need.digest for need in server.heard_of(Need)]
    assert len(asked) == len(set(asked)) == 3, "the experiment, the stream and the model cross the wire once"


async def test_the_supervisor_may_be_there_before_the_coordinator(coordinator: Any, plan: Any, free_port: int) -> None:
    server = coordinator(devices=2, open=False)
    address = f"tcp://127.0.0.1:{free_port}"
    async with supervising(plan(address, 2)) as task:
        await asyncio.sleep(0)
        server.open(address)
        await server.everyone()
        server.stop()
        await ended(task)


async def test_several_devices_per_process_do_the_same_work(coordinator: Any, plan: Any) -> None:
    server = coordinator(devices=7)
    async with supervising(plan(server.address, 7, per_process=3)) as task:
        await server.everyone()
        assert len(named("fedemu-device")) == 3
        assert await server.hold(1, range(7)) == {d: expected(d, 1) for d in range(7)}
        server.stop()
        await ended(task)


async def test_a_killed_device_is_reported_and_its_next_life_makes_the_same_result(coordinator: Any, plan: Any) -> None:
    server = coordinator(slow=0.2)
    async with supervising(plan(server.address)) as task:
        await server.everyone()
        await server.hold(1, range(6))
        ask = server.give(2, range(6))
        await server.proceed(ask)
        for process in named("fedemu-device"):
            process.send_signal(signal.SIGKILL)
        assert await server.finish(ask) == {d: expected(d, 2, own=expected(d, 1)) for d in range(6)}
        assert sorted(message.device for message in server.heard_of(Died)) == list(range(6))
        server.stop()
        await ended(task)


async def test_a_planned_crash_kills_the_process_and_a_leave_ends_it(coordinator: Any, plan: Any) -> None:
    server = coordinator(devices=3, drops={"1.0": "crash", "1.1": "leave", "1.2": "offline"})
    async with supervising(plan(server.address, 3)) as task:
        await server.everyone()
        before = named("fedemu-device")
        await server.proceed(server.give(1, range(3)))
        await server.until(lambda: sum(process.is_running() for process in before) == 1, "two deaths")
        await server.until(lambda: all(len(server.incarnations[d]) == 2 for d in range(3)), "the next lives")
        assert await server.hold(2, range(3)) == {d: expected(d, 2) for d in range(3)}
        server.stop()
        await ended(task)
    assert {message.device for message in server.heard_of(Died)} == {0, 1}
    assert [message.reason for message in server.heard_of(Bye)][:2] in (["leave", "offline"], ["offline", "leave"])


async def test_a_planned_crash_in_a_packed_process_strikes_its_device_alone(coordinator: Any, plan: Any) -> None:
    server = coordinator(devices=5, drops={"2.0": "crash", "2.4": "crash", "3.0": "crash"})
    async with supervising(plan(server.address, 5, per_process=4)) as task:
        await server.everyone()
        packed, alone = sorted(named("fedemu-device"), key=lambda process: process.pid)
        await server.hold(1, range(5))
        ask = server.give(2, range(5))
        await server.proceed(ask)
        results = await server.finish(ask, without=[0, 4])
        assert {d: results[d] for d in (1, 2, 3)} == {d: expected(d, 2, own=expected(d, 1)) for d in (1, 2, 3)}
        await server.until(lambda: [len(server.incarnations[d]) for d in range(5)] == [2, 1, 1, 1, 2], "two new lives")
        await server.proceed(server.give(3, [0]))
        await server.until(lambda: len(server.incarnations[0]) == 3, "its third life")
        assert packed.is_running()
        assert not alone.is_running(), "a device that is alone takes its process with it"
        assert await server.hold(4, [0]) == {0: expected(0, 4, own=expected(0, 1))}, "its own state outlives it"
        server.stop()
        await ended(task)
    assert sorted(message.device for message in server.heard_of(Died)) == [0, 0, 4]
    assert [message.reason for message in server.heard_of(Bye)].count("leave") == 0


async def test_a_silent_device_comes_back_by_itself(coordinator: Any, plan: Any) -> None:
    server = coordinator(devices=2, drops={"1.1": "silence"})
    server.terms.heartbeat_seconds = 0.1
    async with supervising(plan(server.address, 2)) as task:
        await server.everyone()
        await server.proceed(server.give(1, range(2)))
        await server.until(lambda: len(server.incarnations[1]) == 2, "the return")
        assert len(server.incarnations[0]) == 1
        server.stop()
        await ended(task)
    assert server.heard_of(Died) == []


async def test_a_trainer_that_computes_without_end_is_killed_and_its_work_is_done(
    coordinator: Any, plan: Any, tmp_path: Path
) -> None:
    heard = Heard()
    server = coordinator(spins=str(tmp_path / "spun"))
    async with supervising(plan(server.address, stuck_seconds=1.5, observer=heard)) as task:
        await server.everyone()
        assert await server.hold(1, range(6)) == {d: expected(d, 1) for d in range(6)}
        server.stop()
        await ended(task)
    assert any(line.startswith("trainer 0 finished nothing for 1.5 s: device ") for line in heard.told), heard.told


@pytest.mark.parametrize(
    ("how", "bound", "lacked"),
    [
        ("asleep", "idle_seconds", "used no processor time for 1.5 s"),
        ("awake", "stuck_seconds", "finished nothing for 1.5 s"),
    ],
)
async def test_a_trainer_that_hangs_before_it_is_ready_is_killed_and_another_does_the_work(
    coordinator: Any,
    plan: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    how: str,
    bound: str,
    lacked: str,
) -> None:
    heard = Heard()
    server = coordinator(devices=2, hangs=str(tmp_path / f"hung.{how}"))
    async with supervising(plan(server.address, 2, observer=heard, **{bound: 1.5})) as task:
        await server.everyone()
        assert await server.hold(1, range(2)) == {d: expected(d, 1) for d in range(2)}
        server.stop()
        await ended(task)
    assert [line for line in heard.told if line.startswith("trainer")] == [f"trainer 0 {lacked}: its start"]
    assert f"trainer 0 is started again: it was killed because it {lacked}" in caplog.messages


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_trainer_that_is_killed_or_stands_still_loses_nothing(
    coordinator: Any, plan: Any, number: signal.Signals
) -> None:
    server = coordinator(slow=0.2)
    async with supervising(plan(server.address, idle_seconds=2.0)) as task:
        await server.everyone()
        ask = server.give(1, range(6))
        await server.proceed(ask)
        await server.until(lambda: server.results[ask], "the first result")
        (trainer,) = named("fedemu-trainer")
        trainer.send_signal(number)
        assert await server.finish(ask) == {d: expected(d, 1) for d in range(6)}
        assert not trainer.is_running()
        server.stop()
        await ended(task)


async def test_a_process_whose_connection_to_the_bus_breaks_is_replaced(
    coordinator: Any, plan: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus: dict[int, tuple[DirectRouter, bytes]] = {}
    attach = Broker._attach

    def noted(self: Broker, peer: bytes, message: Attach) -> None:
        attach(self, peer, message)
        assert isinstance(self._router, DirectRouter)
        bus[message.number + 100 * (message.role == "trainer")] = self._router, peer

    monkeypatch.setattr(Broker, "_attach", noted)
    server = coordinator(devices=2)
    async with supervising(plan(server.address, 2)) as task:
        await server.everyone()
        await server.hold(1, range(2))
        for router, peer in list(bus.values()):
            router.cut(peer)
        assert len(await server.hold(2, range(2))) == 2
        server.stop()
        await ended(task)
    assert [len(lives) for lives in server.incarnations.values()] == [2, 2]


async def test_a_job_that_kills_trainers_fails_and_the_others_do_not(coordinator: Any, plan: Any) -> None:
    server = coordinator(devices=3, killer=1)
    async with supervising(plan(server.address, 3)) as task:
        await server.everyone()
        ask = server.give(1, range(3))
        await server.proceed(ask)
        assert await server.finish(ask, without=[1]) == {d: expected(d, 1) for d in (0, 2)}
        await server.until(lambda: server.heard_of(Failed), "the failure")
        server.stop()
        await ended(task)
    # The device says it again as long as it gets no answer.
    assert {(message.ask, message.reason) for message in server.heard_of(Failed)} == {("1.0.0", "trainer")}


async def test_a_program_that_fails_on_one_device_is_reported_by_that_device(coordinator: Any, plan: Any) -> None:
    server = coordinator(devices=2, failing=[1])
    async with supervising(plan(server.address, 2)) as task:
        await server.everyone()
        await server.proceed(server.give(1, range(2)))
        await server.until(lambda: server.heard_of(Failed), "the failure")
        assert server.heard_of(Failed)[0] == Failed(ask="1.0.0", reason="training", detail="a toy failure")
        server.stop()
        await ended(task)


async def test_a_killed_zygote_takes_all_devices_with_it_and_all_come_back(coordinator: Any, plan: Any) -> None:
    server = coordinator()
    async with supervising(plan(server.address)) as task:
        await server.everyone()
        await server.hold(1, range(6))
        (zygote,) = named("fedemu-zygote")
        zygote.send_signal(signal.SIGKILL)
        await server.until(lambda: all(len(lives) == 2 for lives in server.incarnations.values()), "the next lives")
        assert await server.hold(2, range(6)) == {d: expected(d, 2, own=expected(d, 1)) for d in range(6)}
        server.stop()
        await ended(task)


async def test_a_coordinator_that_forgot_everyone_is_joined_again(coordinator: Any, plan: Any) -> None:
    server = coordinator()
    async with supervising(plan(server.address)) as task:
        await server.everyone()
        server.forget_everyone()
        await server.everyone()
        await server.until(lambda: server.supervisor is not None, "the supervisor")
        assert {message.lease for message in server.heard_of(Enroll)[1:]} == {"lease-1"}
        assert len(await server.hold(1, range(6))) == 6
        server.stop()
        await ended(task)
    assert server.heard_of(Died) == []


@pytest.mark.parametrize("per_process", [1, 3])
async def test_devices_come_back_as_soon_as_their_machine_does(coordinator: Any, plan: Any, per_process: int) -> None:
    """Their Hellos were lost while there was no way, and their own next try is many minutes away."""
    server, lost = coordinator(devices=3), set()
    server.terms.patience = 1000
    no_way = pytest.MonkeyPatch()
    no_way.setattr(server, "welcome", lambda peer, hello: lost.add(hello.device))
    async with supervising(plan(server.address, 3, per_process=per_process)) as task:
        await server.until(lambda: lost == {0, 1, 2}, "the Hellos of all")
        no_way.undo()
        while len(server.members) < 3:
            server.supervisor = None
            await server.until(lambda: server.supervisor is not None, "the machine")
            assert len(server.heard_of(Enroll)) < 60, "its devices do not come"
        server.stop()
        await ended(task)


async def test_devices_that_heard_the_end_of_a_run_that_goes_on_live_again(coordinator: Any, plan: Any) -> None:
    """The coordinator was interrupted, and tells all. A machine that stands still just then does not hear it."""
    server = coordinator(devices=4)
    async with supervising(plan(server.address, 4, per_process=2)) as task:
        await server.everyone()
        for peer in [*server.members.values()]:
            server.router.send(peer, Stop(reason="interrupted"))
        await server.until(lambda: not server.members and not named("fedemu-device"), "the end of all devices")
        server.forget_everyone()
        await server.until(lambda: server.supervisor is not None, "the machine")
        await server.everyone()
        assert await server.hold(1, range(4)) == {d: expected(d, 1) for d in range(4)}
        server.stop()
        await ended(task)


async def test_a_supervisor_that_was_killed_comes_back_with_its_lease_and_its_devices_states(
    coordinator: Any, plan: Any, separate: Callable[[SupervisorPlan], psutil.Popen]
) -> None:
    server = coordinator(devices=3)
    first = separate(plan(server.address, 3))
    await server.everyone()
    await server.hold(1, range(3))
    family = first.children(recursive=True)
    first.send_signal(signal.SIGKILL)
    _, alive = await asyncio.to_thread(psutil.wait_procs, [first, *family], 10)
    assert alive == []
    async with supervising(plan(server.address, 3)) as task:
        await server.until(lambda: all(len(lives) == 2 for lives in server.incarnations.values()), "the next lives")
        assert await server.hold(2, range(3)) == {d: expected(d, 2, own=expected(d, 1)) for d in range(3)}
        server.stop()
        await ended(task)
    assert [message.lease for message in server.heard_of(Enroll)] == [None, "lease-1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_everything_with_goodbyes(
    coordinator: Any, plan: Any, separate: Callable[[SupervisorPlan], psutil.Popen], number: signal.Signals
) -> None:
    server = coordinator(devices=3)
    process = separate(plan(server.address, 3))
    await server.everyone()
    family = process.children(recursive=True)
    process.send_signal(number)
    _, alive = await asyncio.to_thread(psutil.wait_procs, [process, *family], 10)
    assert alive == []
    assert process.returncode == 4
    await server.until(lambda: len(server.heard_of(Bye)) == 4, "all goodbyes")
    assert server.heard_of(Died) == []


async def test_nobody_at_the_address_is_one_sentence(plan: Any, free_port: int) -> None:
    with pytest.raises(UnreachableError, match=f"No coordinator answered at tcp://127.0.0.1:{free_port} within 0.3 s"):
        await supervise(plan(f"tcp://127.0.0.1:{free_port}", connect_seconds=0.3))


async def test_device_processes_may_open_as_many_files_as_their_devices_need(
    plan: Any, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits: list[int] = []

    async def start() -> ForkingProcess:
        limits.append(open_files())
        return await start_zygote()

    monkeypatch.setattr(supervisor, "start_zygote", start)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
    many = replace(plan(f"tcp://127.0.0.1:{free_port}", connect_seconds=0.3), count=300, per_process=300)
    try:
        with pytest.raises(UnreachableError):
            await supervise(many)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert limits[0] >= FILES_PER_DEVICE * 300


async def test_a_coordinator_that_is_gone_for_good_ends_the_supervisor(coordinator: Any, plan: Any) -> None:
    server = coordinator(devices=2)
    server.terms.heartbeat_seconds = 0.1
    heard = Heard()
    async with supervising(plan(server.address, 2, lost_seconds=1.0, observer=heard)) as task:
        await server.everyone()
        server.close()
        with pytest.raises(UnreachableError, match="has been away for 1 s"):
            await ended(task)
    # If this process was held up for some heartbeats before, the coordinator was also lost and found then.
    assert (heard.told[0], heard.told[-1]) == ("placed 2", "lost")
    assert heard.told.count("lost") == heard.told.count("found") + 1


async def test_other_data_than_the_coordinators_are_refused(coordinator: Any, plan: Any) -> None:
    server = coordinator(data="c" * 64)
    with pytest.raises(DataError, match="cccccccccccc here"):
        await supervise(plan(server.address))


async def test_data_that_cannot_be_prepared_say_why(coordinator: Any, plan: Any) -> None:
    server = coordinator(prepare="There is no column 'writer'.")
    with pytest.raises(DataError, match=r"^There is no column 'writer'\.$"):
        await supervise(plan(server.address))
    await server.until(lambda: server.heard_of(Bye), "the goodbye")
    assert server.heard_of(Bye) == [Bye(reason="unable", detail="There is no column 'writer'.")]


async def test_a_refusal_is_one_sentence(coordinator: Any, plan: Any) -> None:
    server = coordinator()
    server.refusals.append("compute")
    with pytest.raises(RefusedError, match="refused this machine: No"):
        await supervise(plan(server.address))


async def test_a_machine_without_a_place_waits_for_the_end(coordinator: Any, plan: Any) -> None:
    server = coordinator()
    server.refusals.append("fleet_full")
    heard = Heard()
    async with supervising(plan(server.address, observer=heard)) as task:
        await server.until(lambda: heard.told, "the refusal")
        server.supervisor = server.log[0][0]
        server.stop()
        await ended(task)
    assert heard.told == ["placed 0"]


async def test_a_trainer_that_cannot_work_ends_the_machine_with_its_reason(coordinator: Any, plan: Any) -> None:
    server = coordinator(unusable_trainer=True)
    async with supervising(plan(server.address)) as task:
        with pytest.raises(ConfigurationError, match=r"^This toy trainer cannot work\.$"):
            await ended(task)


async def test_behaviours_that_cannot_be_opened_end_the_machine(coordinator: Any, plan: Any) -> None:
    server = coordinator(broken_behaviours=True)
    async with supervising(plan(server.address)) as task:
        with pytest.raises(ConfigurationError, match="can't be opened"):
            await ended(task)


async def test_another_run_at_the_same_address_ends_the_machine(coordinator: Any, plan: Any) -> None:
    server = coordinator(devices=2)
    async with supervising(plan(server.address, 2)) as task:
        await server.everyone()
        server.terms.run = "another-run"
        server.forget_everyone()
        with pytest.raises(RefusedError, match="another-run"):
            await ended(task)


async def test_old_blobs_are_removed_and_those_that_the_machine_itself_needs_are_not(
    coordinator: Any, plan: Any, tmp_path: Path
) -> None:
    server = coordinator(devices=2)
    async with supervising(plan(server.address, 2)) as task:
        await server.everyone()
        (folder,) = (tmp_path / "state").glob("*/*/blobs")
        kept = set(os.listdir(folder))
        assert len(kept) == 2, "the experiment and the stream"
        for round in range(1, 6):
            await server.hold(round, range(2), weight=float(round))
        last = {server.blob("model", encode_tree({"w": np.array([weight])})).digest for weight in (4.0, 5.0)}
        await server.until(lambda: set(os.listdir(folder)) == kept | last, "the eviction of the models before")
        server.stop()
        await ended(task)
