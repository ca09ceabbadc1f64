"""Checkpoints of rounds and of server jobs: what is loaded again, also after kills."""

import json
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from fedemu.coordinator.record import checkpoint, records
from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.ids import digest_of


@dataclass(frozen=True)
class State:
    variables: Mapping[str, torch.Tensor]
    count: int


def state_of(round: int) -> State:
    return State({"w": torch.full((50, 10), float(round)), "b": torch.full((10,), float(round))}, round)


def consistent(loaded: checkpoint.Loaded[State]) -> bool:
    tensors = loaded.state.variables.values()
    return loaded.state.count == loaded.round == loaded.record["r"] and all((t == loaded.round).all() for t in tensors)


def save(directory: Path, round: int) -> None:
    checkpoint.save(directory, round, state_of(round), {"r": round})


def test_a_folder_without_a_checkpoint_loads_nothing(tmp_path: Path):
    assert checkpoint.load(tmp_path / "absent", state_of(0)) is None
    assert checkpoint.load(tmp_path, state_of(0)) is None


def test_a_saved_checkpoint_is_loaded(tmp_path: Path):
    record = {"r": 3, "away": [1.5, float("inf")], "roster": {"7": {"lease": "x", "charged": ["ab", "cd"]}}}
    checkpoint.save(tmp_path, 3, state_of(3), record)
    loaded = checkpoint.load(tmp_path, state_of(0))
    assert loaded is not None
    assert consistent(loaded)
    assert loaded.record == record


def test_the_newest_round_is_loaded_and_it_is_kept_with_the_one_before(tmp_path: Path):
    for round in (8, 9, 10):
        save(tmp_path, round)
    loaded = checkpoint.load(tmp_path, state_of(0))
    assert (loaded.round, loaded.oldest, loaded.damage) == (10, 9, ())
    kept = ["record-10.json", "record-9.json", "state-10.0.safetensors", "state-9.0.safetensors"]
    assert sorted(os.listdir(tmp_path)) == kept


def test_a_round_that_is_saved_again_replaces_itself(tmp_path: Path):
    checkpoint.save(tmp_path, 1, state_of(5), {"r": 5})
    save(tmp_path, 1)
    assert consistent(checkpoint.load(tmp_path, state_of(0)))
    assert len(os.listdir(tmp_path)) == 2


def flip(path: Path, place: float) -> None:
    """Change one bit of a file, at a share of its length."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["state-2.0.safetensors", "record-2.json"])
@pytest.mark.parametrize("damage", ["short", "empty", "gone", "another", *(place / 10 for place in range(10))])
def test_a_damaged_newest_checkpoint_is_told_and_the_one_before_is_loaded(tmp_path: Path, name: str, damage: Any):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / name
    match damage:
        case "gone":
            path.unlink()
        case "another":
            path.write_text("[]")
        case "short" | "empty":
            os.truncate(path, path.stat().st_size // 2 if damage == "short" else 0)
        case place:
            flip(path, place)
    loaded = checkpoint.load(tmp_path, state_of(0))
    assert loaded.round == 1
    assert consistent(loaded)
    if (name, damage) == ("record-2.json", "gone"):
        assert loaded.damage == ()  # then there is no second checkpoint
    else:
        [sentence] = loaded.damage
        assert name in sentence


def test_a_record_before_checksums_is_read_unless_its_tensors_are_damaged(tmp_path: Path):
    save(tmp_path, 3)
    record = tmp_path / "record-3.json"
    document = json.loads(record.read_bytes().splitlines()[0]) | {"format": 1}
    del document["tensors_sha256"]
    record.write_text(json.dumps(document))
    assert consistent(checkpoint.load(tmp_path, state_of(0)))
    os.truncate(tmp_path / "state-3.0.safetensors", 100)
    with pytest.raises(ConfigurationError, match="safetensors is damaged: it is no file of tensors any more"):
        checkpoint.load(tmp_path, state_of(0))


def test_an_error_says_that_no_checkpoint_can_be_read(tmp_path: Path):
    save(tmp_path, 2)
    (tmp_path / "record-2.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"No checkpoint in .* can be read: .*record-2\.json is damaged"):
        checkpoint.load(tmp_path, state_of(0))


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path):
    save(tmp_path, 2)
    records.write_record(tmp_path, 2, records.read_record(tmp_path, 2) | {"format": 99})
    with pytest.raises(
        ConfigurationError, match="format 99 instead of 2; resume the run with the version of fedemu that wrote it"
    ):
        checkpoint.load(tmp_path, state_of(0))


def test_loaded_tensors_can_be_written_to(tmp_path: Path):
    save(tmp_path, 2)
    loaded = checkpoint.load(tmp_path, state_of(0))
    loaded.state.variables["w"].zero_()
    save(tmp_path, 3)
    assert loaded.state.variables["b"].sum() == 20.0
    assert all(t.data_ptr() % 64 == 0 for t in loaded.state.variables.values())


@pytest.mark.parametrize("same_round", [False, True])
def test_a_save_that_breaks_off_at_any_step_leaves_a_whole_checkpoint(tmp_path: Path, monkeypatch, same_round: bool):
    class BrokenOff(BaseException):
        pass

    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: sorted(listed(folder), reverse=True))  # tensors before records
    broken = 0
    for stop in range(100):
        directory = tmp_path / str(stop)
        save(directory, 7 if same_round else 6)
        calls = iter(range(100))

        def counted(original, calls=calls, stop=stop):
            def call(*args, **kwargs):
                if next(calls) == stop:
                    raise BrokenOff
                return original(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for owner, name in ((os, "replace"), (os, "unlink"), (Path, "write_bytes")):
                patch.setattr(owner, name, counted(getattr(owner, name)))
            try:
                save(directory, 7)
            except BrokenOff:
                broken += 1
            else:
                break
        loaded = checkpoint.load(directory, state_of(0))
        assert consistent(loaded)
        for recorded in records.recorded_rounds(directory):
            assert (directory / records.read_record(directory, recorded)["tensors"]).exists()
        save(directory, loaded.round + 1)
        save(directory, loaded.round + 2)
        assert len(os.listdir(directory)) == 4
    assert broken >= 4


def test_tensors_are_on_the_disk_before_the_record_that_names_them(tmp_path: Path, monkeypatch):
    steps = []
    replace = os.replace
    monkeypatch.setattr("fedemu.protocol.host.files.wait_for_disk", lambda path: steps.append(f"wait {path.name}"))
    monkeypatch.setattr(os, "replace", lambda old, new: (steps.append(f"rename {new.name}"), replace(old, new)))
    save(tmp_path / "new", 1)
    assert steps == [
        f"wait {tmp_path.name}",
        "wait state-1.0.safetensors.partial",
        "rename state-1.0.safetensors",
        "wait new",
        "wait record-1.json.partial",
        "rename record-1.json",
        "wait new",
    ]


def test_a_run_goes_on_with_its_own_data_alone():
    own, others = digest_of(b"own"), digest_of(b"others")
    checkpoint.require_data(checkpoint.Loaded(1, None, {"data": own}, 1), own)
    checkpoint.require_data(checkpoint.Loaded(1, None, {}, 1), own)  # of an earlier version
    with pytest.raises(ConfigurationError, match=rf"\(digest {own[:8]}\w*\.\.\. then, {others[:8]}\w*\.\.\. now\)"):
        checkpoint.require_data(checkpoint.Loaded(1, None, {"data": own}, 1), others)


def save_for_ever(directory: Path, first: int, progress) -> None:
    torch.set_num_threads(1)
    for round in range(first, 1_000_000):
        save(directory, round)
        progress.value = round


def test_a_checkpoint_survives_kills_at_any_instant(tmp_path: Path):
    forks = multiprocessing.get_context("fork")
    chance = random.Random(1)
    reached = 0
    for _ in range(30):
        progress = forks.Value("q", reached, lock=False)
        child = forks.Process(target=save_for_ever, args=(tmp_path, reached + 1, progress))
        child.start()
        bound = time.monotonic() + 30
        while progress.value < reached + 3:
            assert time.monotonic() < bound
        instant = time.perf_counter() + chance.uniform(0, 0.003)
        while time.perf_counter() < instant:
            pass
        os.kill(child.pid, signal.SIGKILL)
        child.join(30)
        loaded = checkpoint.load(tmp_path, state_of(0))
        assert loaded.round >= progress.value
        assert consistent(loaded)
        reached = loaded.round
    assert len(os.listdir(tmp_path)) <= 8


def test_a_jobs_carry_is_loaded_in_its_order_with_its_bits(tmp_path: Path):
    carry = {"z": torch.tensor([1.0, float("nan")]), "a": torch.tensor(3), "t": torch.arange(4.0).reshape(2, 2).t()}
    checkpoint.save_job(tmp_path, 4, 1, 30, carry)
    job = checkpoint.load_job(tmp_path, 4, 1)
    assert (job.step, job.finished, list(job.carry)) == (30, False, ["z", "a", "t"])
    assert torch.equal(job.carry["t"], carry["t"])
    assert torch.equal(job.carry["z"].view(torch.int32), carry["z"].view(torch.int32))


def test_jobs_are_told_apart_by_round_attempt_and_ordinal(tmp_path: Path):
    checkpoint.save_job(tmp_path, 4, 1, 1, {"w": torch.tensor(1)})
    checkpoint.save_job(tmp_path, 4, 2, 2, {"w": torch.tensor(2)}, finished=True)
    checkpoint.save_job(tmp_path, 4, 1, 3, {"w": torch.tensor(3)}, attempt=1)
    assert checkpoint.load_job(tmp_path, 4, 1).step == 1
    assert checkpoint.load_job(tmp_path, 4, 2).finished
    assert checkpoint.load_job(tmp_path, 4, 1, attempt=1).step == 3
    assert checkpoint.load_job(tmp_path, 5, 1) is None
    assert checkpoint.load_job(tmp_path / "absent", 4, 1) is None


def test_a_job_that_began_from_something_else_is_passed_over_and_replaced(tmp_path: Path):
    checkpoint.save_job(tmp_path, 4, 0, 9, {"w": torch.tensor(9)}, basis="six replies")
    assert checkpoint.load_job(tmp_path, 4, 0, basis="six replies").step == 9
    assert checkpoint.load_job(tmp_path, 4, 0, basis="five replies") is None
    for step in (9, 1):
        checkpoint.save_job(tmp_path, 4, 0, step, {"w": torch.tensor(step - 1)}, basis="five replies")
        assert checkpoint.load_job(tmp_path, 4, 0, basis="five replies").carry["w"] == step - 1
        assert os.listdir(tmp_path) == [f"job-4.0.0.{step}.safetensors"]


@pytest.mark.parametrize("backwards", [False, True])
def test_only_the_newest_carry_of_a_job_is_kept_and_the_newest_that_is_whole_is_loaded(
    tmp_path: Path, monkeypatch, backwards: bool
):
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder: sorted(listed(folder), reverse=backwards))
    folder, killed = tmp_path / "new" / "jobs", "job-4.0.0.9.safetensors"
    checkpoint.save_job(folder, 4, 0, 9, {"w": torch.tensor(9)})
    left = (folder / killed).read_bytes()
    checkpoint.save_job(folder, 4, 0, 10, {"w": torch.tensor(10)})
    assert os.listdir(folder) == ["job-4.0.0.10.safetensors"]
    (folder / killed).write_bytes(left)  # as of a coordinator that was killed before it could remove it
    assert checkpoint.load_job(folder, 4, 0).carry["w"] == 10
    flip(folder / "job-4.0.0.10.safetensors", 0.999)
    assert checkpoint.load_job(folder, 4, 0).carry["w"] == 9


def test_a_damaged_carry_of_a_job_is_passed_over_whichever_bit_is_another(tmp_path: Path):
    carry = {"w": torch.tensor([1.0, 2.0]), "i": torch.tensor(3)}
    checkpoint.save_job(tmp_path, 4, 0, 12, carry, basis="six replies")
    path = tmp_path / "job-4.0.0.12.safetensors"
    content = path.read_bytes()
    passed_over = 0
    for place in range(len(content)):
        for bit in range(8):
            damaged = bytearray(content)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            job = checkpoint.load_job(tmp_path, 4, 0, basis="six replies")
            passed_over += job is None
            if job is not None:  # such as a blank that became another one
                assert (job.step, job.finished, list(job.carry)) == (12, False, ["w", "i"])
                assert all(torch.equal(job.carry[name], carry[name]) for name in carry)
    assert passed_over > 0.9 * 8 * len(content)


def test_a_durable_round_drops_its_jobs_and_the_jobs_of_earlier_rounds(tmp_path: Path):
    for round in (3, 4, 5):
        checkpoint.save_job(tmp_path, round, 0, 1, {"w": torch.tensor(round)}, finished=True)
    save(tmp_path, 4)
    assert checkpoint.load_job(tmp_path, 3, 0) is None
    assert checkpoint.load_job(tmp_path, 4, 0) is None
    assert checkpoint.load_job(tmp_path, 5, 0).carry["w"] == 5


def test_a_durable_round_drops_what_killed_writers_left_and_nothing_that_a_later_round_is_writing(tmp_path: Path):
    save(tmp_path, 3)
    others = {"job-5.0.0.2.safetensors.partial", "leases.jsonl"}
    left = ["job-4.0.0.7.safetensors.partial", "record-3.json.partial", "state-3.0.safetensors.partial"]
    for name in (*left, *others):
        (tmp_path / name).write_bytes(b"half")
    save(tmp_path, 4)
    assert others < set(os.listdir(tmp_path))
    assert not set(left) & set(os.listdir(tmp_path))


def test_a_checkpoint_that_cannot_be_written_says_where(tmp_path: Path):
    (tmp_path / "checkpoint").write_text("a file")
    with pytest.raises(FedemuError, match=r"checkpoint cannot be written: File exists"):
        save(tmp_path / "checkpoint", 1)
