"""A trainer's side of the bus: when it ends, and what it tells then."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fedemu.device.bus import TO_SUPERVISOR, Attach, Done, Faulty, Finished, Quit, Ready, Train
from fedemu.device.compute import shell
from fedemu.device.compute.shell import Answer
from fedemu.device.pipe import TrainerSetup
from fedemu.protocol.codec import Envelope
from fedemu.protocol.errors import MachineFault
from fedemu.protocol.messages import TensorSpec
from fedemu.protocol.transport.direct import DirectNetwork


class Bus:
    """A supervisor's side of the bus, with one trainer in the same process.

    ``apart``: the trainer has a thread and an event loop of its own, so that the supervisor reads while it computes.
    """

    def __init__(
        self, folder: Path, open_runner: Callable[[TrainerSetup], Any] | None = None, apart: bool = False
    ) -> None:
        self._network = DirectNetwork(asyncio.get_running_loop())
        self.heard: list[type] = []
        self.told: list[str] = []
        self._peer = b""
        address = f"ipc://{folder}/bus"
        self.router = self._network.bind(address, TO_SUPERVISOR, self._received, lambda peer, error: None)
        setup = TrainerSetup(
            number=0, bus=address, token="token", trainer="t", experiment="e", device_type="cpu", allow_code=None
        )
        opened = open_runner or (lambda setup: MagicMock(capacity={}))
        serving = shell._serve(setup, opened)
        self.task = asyncio.create_task(asyncio.to_thread(asyncio.run, serving) if apart else serving)

    def _received(self, peer: bytes, envelope: Envelope) -> None:
        self._peer = peer
        self.heard.append(type(envelope.message))
        if isinstance(envelope.message, Faulty):
            self.told.append(envelope.message.detail)

    async def ready(self, until: Callable[..., Any]) -> None:
        await until(lambda: self.heard == [Attach, Ready], "the trainer")

    def train(self) -> None:
        train = Train(group=1, ask="1.0.0", program="train", task=0, shared=(), jobs=(), tensors=())
        self.router.send(self._peer, train)

    def say_what_no_trainer_reads(self) -> None:
        self.router.send(self._peer, Quit())

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.close()

    def close(self) -> None:
        self._network.close()


async def test_a_trainer_whose_connection_broke_waits_for_its_own_end_before_it_tells_a_fault(
    socket_folder: Path, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slept: list[tuple[float, int]] = []
    waits = MagicMock(wraps=time, sleep=lambda seconds: slept.append((seconds, len(caplog.records))))
    monkeypatch.setattr(shell, "time", waits)
    bus = Bus(socket_folder)
    await bus.ready(until)
    bus.close()
    assert await asyncio.wait_for(bus.task, 30) == 1
    assert slept == [(shell.PARTING_SECONDS, 0)], "a trainer that is killed meanwhile has told nothing"
    assert [record.getMessage() for record in caplog.records] == [
        "the trainer ends: it has no connection to the supervisor"
    ]


async def test_a_trainer_that_gets_no_connection_does_not_try_for_ever(
    socket_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shell, "time", MagicMock(wraps=time, sleep=lambda seconds: None))
    monkeypatch.setattr(shell, "ATTACH_SECONDS", 0.0)
    setup = TrainerSetup(
        number=0,
        bus=f"ipc://{socket_folder}/nobody",
        token="token",
        trainer="t",
        experiment="e",
        device_type="cpu",
        allow_code=None,
    )
    serving = shell._serve(setup, lambda setup: MagicMock(capacity={}))
    assert await asyncio.wait_for(serving, 60) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "the trainer ends: it has no connection to the supervisor"
    ]


async def test_a_trainer_for_which_the_machine_has_not_enough_tells_a_line_and_no_traceback(
    socket_folder: Path, until: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    bus = Bus(socket_folder)
    await bus.ready(until)
    asyncio.get_running_loop().call_soon(fail)
    assert await asyncio.wait_for(bus.task, 60) == 1
    bus.close()
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [
        ("the trainer ends: the limit of open files is reached; raise it (ulimit -n)", None)
    ]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("the GPU is hot"), "RuntimeError: the GPU is hot"),
        (MachineFault("device 3: can't allocate memory"), "device 3: can't allocate memory"),
        (OSError(errno.EMFILE, "many"), "the limit of open files is reached; raise it (ulimit -n)"),
    ],
)
async def test_a_trainer_that_cannot_go_on_tells_why_and_runs_no_other_group(
    socket_folder: Path, until: Callable[..., Any], caplog: pytest.LogCaptureFixture, error: Exception, said: str
) -> None:
    runner = MagicMock(capacity={}, **{"run.side_effect": error})
    bus = Bus(socket_folder, lambda setup: runner)
    await bus.ready(until)
    bus.train()
    bus.train()
    bus.say_what_no_trainer_reads()
    await until(lambda: len(caplog.records) == 2, "the end of what it was sent")
    await until(lambda: bus.told, "its reason")
    assert (bus.told, runner.run.call_count) == ([said], 1)
    lacks = isinstance(error, OSError)
    [record, unreadable] = caplog.records
    assert (record.getMessage(), record.exc_info is None) == (
        (f"the trainer cannot go on: {said}" if lacks else "the trainer cannot go on", lacks)
    )
    assert unreadable.getMessage().startswith("unreadable message on the bus: ")
    await bus.end()


def answered(devices: Iterable[int], size: int) -> Iterator[Answer]:
    """The answers of the devices, whose payloads have so many bytes."""
    payload = TensorSpec(name="w", dtype="uint8", shape=(size,))
    for device in devices:
        done = Done(
            device=device,
            ask="1.0.0",
            examples=1,
            steps=1,
            metrics={},
            label_counts=None,
            wrote_own=False,
            tensors=(payload,),
        )
        yield done, [bytes(size)]


async def test_no_answer_of_a_large_group_is_lost_although_the_supervisor_reads_only_at_its_end(
    socket_folder: Path, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "PUSHING_SECONDS", 0.1)
    bus = Bus(socket_folder, lambda setup: MagicMock(capacity={}, run=lambda *group: answered(range(4000), 1000)))
    await bus.ready(until)
    bus.train()
    await until(lambda: Finished in bus.heard, "the end of the group")
    assert bus.heard == [Attach, Ready, *[Done] * 4000, Finished]
    await bus.end()


async def test_answers_for_which_the_kernel_has_no_room_reach_the_supervisor_before_the_group_ends(
    socket_folder: Path, until: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shell, "PUSHING_SECONDS", 30.0)
    heard_all = threading.Event()
    in_time: list[bool] = []

    def run(*group: object) -> Iterator[Answer]:
        yield from answered(range(64), 20_000)
        in_time.append(heard_all.wait(10))  # the next stack is computed

    bus = Bus(socket_folder, lambda setup: MagicMock(capacity={}, run=run), apart=True)
    await bus.ready(until)
    bus.train()
    await until(lambda: bus.heard.count(Done) == 64, "the answers of the first stack")
    heard_all.set()
    await until(lambda: Finished in bus.heard, "the end of the group")
    assert in_time == [True]
    bus.close()
    assert await asyncio.wait_for(bus.task, 30) == 1


async def test_a_trainer_that_cannot_be_opened_tells_why(socket_folder: Path, until: Callable[..., Any]) -> None:
    bus = Bus(socket_folder, MagicMock(side_effect=RuntimeError("there is no GPU")))
    await until(lambda: bus.told, "its reason")
    assert (bus.heard, bus.told) == ([Attach, Faulty], ["RuntimeError: there is no GPU"])
    assert not bus.task.done(), "it waits to be killed"
    await bus.end()
