"""The bus of a machine: who is heard on it, and the way of a job from a device process to a trainer and back."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fedemu.device.bus import (
    TO_PROCESS,
    TO_TRAINER,
    Attach,
    Done,
    Faulty,
    Finished,
    JobFailed,
    Joined,
    Quit,
    Reachable,
    Ready,
    Rouse,
    Submit,
    Train,
    Unusable,
    Withdraw,
)
from fedemu.device.machine import broker as broker_module
from fedemu.device.machine.broker import Broker
from fedemu.device.machine.jobs import MAX_DEATHS
from fedemu.device.machine.observer import MachineObserver
from fedemu.ops.stress.strangers.zmtp import MORE, dial, frame, shake_hands
from fedemu.protocol.blobs.store import BlobStore
from fedemu.protocol.codec import Envelope, encode
from fedemu.protocol.errors import BlobError, FedemuError
from fedemu.protocol.ids import Digest, digest_of
from fedemu.protocol.messages import BlobRef, Message, TensorSpec
from fedemu.protocol.transport import connections
from fedemu.protocol.transport.direct import DirectNetwork
from fedemu.protocol.transport.memory import MemoryNetwork
from fedemu.protocol.transport.zeromq import ZmqNetwork

MODEL = b"weights"
REF = BlobRef(key="model", digest=digest_of(MODEL), size=len(MODEL))
INDICES = TensorSpec(name=".", dtype="int64", shape=(2,))
DONE = Done(device=3, ask="1.0.0", examples=2, steps=1, metrics={}, label_counts=None, wrote_own=False, tensors=())


class Observed(MachineObserver):
    def __init__(self) -> None:
        self.trainings: list[tuple[float, int, int]] = []
        self.jobs_given_up = 0

    def trained(self, seconds: float, done: int, failed: int) -> None:
        self.trainings.append((seconds, done, failed))

    def given_up(self) -> None:
        self.jobs_given_up += 1


class Bus:
    """A broker on a network in memory, and the peers that the test lets join."""

    def __init__(self, folder: Path) -> None:
        self.network = MemoryNetwork()
        self.store = BlobStore(folder)
        self.observer = Observed()
        self.wanted: list[BlobRef] = []
        self.failures: list[FedemuError] = []
        self.joined: list[tuple[int, int]] = []
        self.broker = Broker(
            self.network,
            "bus",
            "token",
            self.store,
            self.observer,
            want=self.wanted.append,
            failed=self.failures.append,
        )
        self.broker.joined = lambda device, incarnation: self.joined.append((device, incarnation))

    def peer(self, role: Any, token: str = "token", number: int = 0) -> Peer:
        peer = Peer(self.network, role)
        peer.dealer.send(Attach(token=token, role=role, number=number))
        return peer


class Peer:
    """A device process or a trainer that keeps what it hears."""

    def __init__(self, network: MemoryNetwork, role: str) -> None:
        self.heard: list[Message] = []
        self.frames: list[tuple[Any, ...]] = []
        decoder = TO_PROCESS if role == "process" else TO_TRAINER
        self.dealer = network.connect("bus", decoder, self._received, lambda error: None)

    def submit(self, device: int = 3, *tensors: TensorSpec) -> None:
        """Submit a job with the tensors, which are ``INDICES`` unless they are given."""
        tensors = tensors or (INDICES,)
        job = Submit(
            device=device,
            ask="1.0.0",
            program="train",
            task=0,
            shared=(REF,),
            own=None,
            next_own="next",
            tensors=tensors,
        )
        self.dealer.send(job, [np.array([6, 7]).tobytes() for _ in tensors])

    def _received(self, envelope: Envelope) -> None:
        self.heard.append(envelope.message)
        self.frames.append(tuple(envelope.frames))


@pytest.fixture
async def bus(tmp_path: Path) -> AsyncIterator[Bus]:
    made = Bus(tmp_path)
    yield made
    made.broker.close()
    made.network.close()


async def test_a_job_goes_to_a_trainer_and_its_answer_back_to_the_device(bus: Bus, until: Callable[..., Any]) -> None:
    bus.store.put(MODEL)
    process, trainer = bus.peer("process"), bus.peer("trainer")
    trainer.dealer.send(Ready(capacity={"train": 4}))
    process.submit()
    await until(lambda: trainer.heard, "the group")
    (group,) = trainer.heard
    assert isinstance(group, Train)
    assert [(job.device, job.tensors) for job in group.jobs] == [(3, 1)]
    assert [(file.key, file.path) for file in group.shared] == [("model", str(bus.store.path(digest_of(MODEL))))]
    assert [spec.name for spec in group.tensors] == ["3/."]
    assert np.frombuffer(trainer.frames[0][0], np.int64).tolist() == [6, 7]
    trainer.dealer.send(DONE)
    trainer.dealer.send(Finished(group=group.group, seconds=0.25))
    await until(lambda: process.heard and bus.observer.trainings, "the answer")
    assert process.heard == [DONE]
    assert bus.observer.trainings == [(0.25, 1, 0)]


async def test_a_tensor_with_the_longest_name_and_of_the_last_device_reaches_the_trainer(
    bus: Bus, until: Callable[..., Any]
) -> None:
    bus.store.put(MODEL)
    process, trainer = bus.peer("process"), bus.peer("trainer")
    trainer.dealer.send(Ready(capacity={"train": 4}))
    process.submit(2**31 - 1, INDICES, replace(INDICES, name="x" * 256))
    await until(lambda: trainer.heard, "the group")
    (group,) = trainer.heard
    assert isinstance(group, Train)
    assert [spec.name for spec in group.tensors] == ["2147483647/.", "2147483647/" + "x" * 256]


async def test_a_stranger_is_not_heard(bus: Bus, until: Callable[..., Any]) -> None:
    stranger, process = bus.peer("process", token="guessed"), bus.peer("process")
    stranger.dealer.send(Joined(device=1, incarnation=7))
    process.dealer.send(Joined(device=2, incarnation=8))
    await until(lambda: bus.joined, "a device")
    assert bus.joined == [(2, 8)]


async def test_a_missing_blob_is_asked_for_and_its_job_waits(bus: Bus, until: Callable[..., Any]) -> None:
    process, trainer = bus.peer("process"), bus.peer("trainer")
    trainer.dealer.send(Ready(capacity={"train": 4}))
    process.submit()
    await until(lambda: bus.wanted == [REF], "the wish")
    assert trainer.heard == []
    bus.broker.arrived(bus.store.put(MODEL))
    await until(lambda: trainer.heard, "the group")


async def test_a_job_whose_blob_cannot_be_had_fails(bus: Bus, until: Callable[..., Any]) -> None:
    process = bus.peer("process")
    process.submit()
    await until(lambda: bus.wanted, "the wish")
    bus.broker.lost(Digest(REF.digest), BlobError("It is gone."))
    await until(lambda: process.heard, "the answer")
    assert process.heard == [JobFailed(device=3, ask="1.0.0", reason="blob", detail="It is gone.")]


async def test_a_job_that_its_trainer_leaves_unanswered_fails(bus: Bus, until: Callable[..., Any]) -> None:
    bus.store.put(MODEL)
    process, trainer = bus.peer("process"), bus.peer("trainer")
    trainer.dealer.send(Ready(capacity={"train": 4}))
    process.submit()
    await until(lambda: trainer.heard, "the group")
    trainer.dealer.send(Finished(group=0, seconds=0.1))
    await until(lambda: process.heard, "the answer")
    (answer,) = process.heard
    assert isinstance(answer, JobFailed)
    assert answer.reason == "trainer"
    assert bus.observer.jobs_given_up == 1


async def test_a_job_that_is_withdrawn_or_whose_process_ends_before_it_begins_is_not_run(
    bus: Bus, until: Callable[..., Any]
) -> None:
    bus.store.put(MODEL)
    process, ending = bus.peer("process"), bus.peer("process", number=1)
    ending.submit(5)
    ending.dealer.send(Joined(device=5, incarnation=1))
    for device in (3, 4):
        process.submit(device)
    process.dealer.send(Withdraw(device=3, ask="1.0.0"))
    process.dealer.send(Joined(device=4, incarnation=1))
    await until(lambda: len(bus.joined) == 2, "what was said before")
    bus.broker.process_ended(1)
    trainer = bus.peer("trainer")
    trainer.dealer.send(Ready(capacity={"train": 4}))
    await until(lambda: trainer.heard, "the group")
    assert [job.device for job in trainer.heard[0].jobs] == [4]


async def test_a_blob_that_a_trainer_cannot_read_is_held_against_its_digest(
    bus: Bus, until: Callable[..., Any]
) -> None:
    path = bus.store.path(bus.store.put(MODEL))
    process, trainer = bus.peer("process"), bus.peer("trainer")
    trainer.dealer.send(Ready(capacity={"train": 4}))
    process.submit()
    await until(lambda: trainer.heard, "the group")
    path.chmod(0o644)
    path.write_bytes(b"no weights")
    failed = JobFailed(device=3, ask="1.0.0", reason="blob", detail="it is damaged")
    trainer.dealer.send(failed)
    await until(lambda: process.heard, "the answer")
    assert process.heard == [failed]
    assert not bus.store.has(Digest(REF.digest))


async def test_the_device_hears_of_a_job_over_which_trainers_died(bus: Bus, until: Callable[..., Any]) -> None:
    bus.store.put(MODEL)
    device = bus.peer("process")
    device.submit()
    for _ in range(MAX_DEATHS):
        assert device.heard == []
        trainer = bus.peer("trainer")
        trainer.dealer.send(Ready(capacity={"train": 4}))
        await until(lambda heard=trainer.heard: heard, "the group")
        bus.broker.trainer_ended(0, "ended with code 1")
    await until(lambda: device.heard, "the answer")
    said = "3 trainers died over it; the last one ended with code 1"
    assert device.heard == [JobFailed(device=3, ask="1.0.0", reason="trainer", detail=said)]
    assert bus.observer.jobs_given_up == 1


async def test_the_reason_for_which_a_job_is_given_up_is_cut_to_what_the_device_reads(
    bus: Bus, until: Callable[..., Any]
) -> None:
    bus.store.put(MODEL)
    device = bus.peer("process")
    device.submit()
    for _ in range(MAX_DEATHS):
        trainer = bus.peer("trainer")
        trainer.dealer.send(Ready(capacity={"train": 4}))
        await until(lambda heard=trainer.heard: heard, "the group")
        bus.broker.trainer_ended(0, f"could not go on: {'y' * 2048}")
    await until(lambda: device.heard, "the answer")
    [answer] = device.heard
    assert isinstance(answer, JobFailed)
    said = "3 trainers died over it; the last one could not go on: "
    assert answer.detail == said + "y" * (2048 - len(said))


async def test_a_trainer_that_cannot_go_on_is_told_with_its_reason(bus: Bus, until: Callable[..., Any]) -> None:
    faulty: list[tuple[int, str]] = []
    bus.broker.trainer_faulty = lambda number, why: faulty.append((number, why))
    bus.peer("trainer").dealer.send(Faulty(detail="CUDA out of memory"))
    await until(lambda: faulty, "the reason")
    assert faulty == [(0, "CUDA out of memory")]


async def test_jobs_that_went_to_a_trainer_whose_last_words_came_late_go_to_the_next(
    bus: Bus, until: Callable[..., Any]
) -> None:
    bus.store.put(MODEL)
    process, late = bus.peer("process"), bus.peer("trainer")
    late.dealer.send(Ready(capacity={"train": 4}))
    process.submit()
    await until(lambda: late.heard, "the group")
    trainer = bus.peer("trainer")
    trainer.dealer.send(Ready(capacity={"train": 4}))
    await until(lambda: trainer.heard, "the group again")
    late.dealer.send(DONE)
    trainer.dealer.send(DONE)
    await until(lambda: process.heard, "the answer")
    assert len(process.heard) == 1


@pytest.mark.parametrize(("in_work", "code"), [(False, 2), (True, 5)])
async def test_a_trainer_that_cannot_work_ends_the_machine(
    bus: Bus, until: Callable[..., Any], in_work: bool, code: int
) -> None:
    bus.peer("trainer").dealer.send(Unusable(detail="The disk is full.", in_work=in_work))
    await until(lambda: bus.failures, "the failure")
    assert [str(error) for error in bus.failures] == ["The disk is full."]
    assert bus.failures[0].exit_code == code


async def test_a_process_that_attaches_after_the_farewell_is_told_to_end_as_well(
    bus: Bus, until: Callable[..., Any]
) -> None:
    early = bus.peer("process")
    early.dealer.send(Joined(device=0, incarnation=1))
    await until(lambda: bus.joined, "the first process")
    bus.broker.quit_processes()
    late = bus.peer("process")
    await until(lambda: early.heard and late.heard, "both ends")
    assert early.heard == late.heard == [Quit()]


async def test_only_a_process_that_has_attached_can_be_roused(bus: Bus, until: Callable[..., Any]) -> None:
    attached: list[int] = []
    bus.broker.attached = attached.append
    assert not bus.broker.rouse(0, [(3, 1)])
    process = bus.peer("process")
    await until(lambda: attached, "the process")
    assert bus.broker.rouse(0, [(3, 1)])
    await until(lambda: process.heard, "the lives")
    assert process.heard == [Rouse(lives=((3, 1),))]


async def test_all_processes_hear_that_the_coordinator_can_be_reached_again(
    bus: Bus, until: Callable[..., Any]
) -> None:
    attached: list[int] = []
    bus.broker.attached = attached.append
    first, second = bus.peer("process"), bus.peer("process", number=1)
    await until(lambda: len(attached) == 2, "both processes")
    bus.broker.coordinator_reachable()
    await until(lambda: first.heard and second.heard, "the news")
    assert first.heard == second.heard == [Reachable()]


@pytest.fixture
def bus_address(socket_folder: Path) -> str:
    return f"ipc://{socket_folder}/s"


async def test_a_machine_whose_bus_was_removed_ends_with_a_sentence(
    bus_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "LOOK_SECONDS", 0.01)
    network, store = DirectNetwork(asyncio.get_running_loop(), 0.1), BlobStore(tmp_path / "blobs")
    failed: asyncio.Future[FedemuError] = asyncio.get_running_loop().create_future()
    broker = Broker(network, bus_address, "token", store, Observed(), want=print, failed=failed.set_result)
    os.unlink(bus_address.removeprefix("ipc://"))
    assert "was removed, so no process can connect there any more" in str(await asyncio.wait_for(failed, 30))
    broker.close()
    network.close()


async def test_a_stranger_on_the_bus_is_parted_from_when_he_takes_memory(
    bus_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.0)
    network, store = ZmqNetwork(linger_seconds=0.1), BlobStore(tmp_path / "blobs")
    broker = Broker(network, bus_address, "token", store, Observed(), want=lambda blob: None, failed=lambda error: None)
    terabyte = b"\x02" + (2**40).to_bytes(8, "big")
    assert await asyncio.to_thread(is_parted_from, broker.address, terabyte, 1)
    assert await asyncio.to_thread(is_parted_from, broker.address, frame(bytes(2**20), MORE), 512)
    broker.close()
    network.close()


async def test_a_stranger_who_sends_garbage_on_the_bus_is_parted_from_and_fills_no_log(
    bus_address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network, store = DirectNetwork(asyncio.get_running_loop(), 0.1), BlobStore(tmp_path / "blobs")
    broker = Broker(network, bus_address, "token", store, Observed(), want=lambda blob: None, failed=lambda error: None)
    guess = encode(Attach(token="guessed", role="process", number=0))[0]
    for sent in (frame(b"garbage"), frame(bytes(guess))):
        for _ in range(12):
            assert await asyncio.to_thread(is_parted_from, broker.address, sent, 3)
    said = [record.getMessage().partition(" so far")[0] for record in caplog.records]
    assert [each for each in said if "cannot be read" in each] == [
        f"a stranger on the bus sent what cannot be read ({count}" for count in (1, 10)
    ]
    assert [each for each in said if "attach" in each] == [
        f"a stranger on the bus tried to attach ({count}" for count in (1, 10)
    ]
    broker.close()
    network.close()


def is_parted_from(address: str, data: bytes, times: int) -> bool:
    """Whether a stranger who sends ``data`` so many times finds his connection closed."""
    with dial(address, seconds=60) as stranger, contextlib.suppress(ConnectionError):
        shake_hands(stranger)
        for _ in range(times):
            stranger.sendall(data)
        while stranger.recv(4096):
            pass
    return True
