"""Decoded data sets on disk."""

import errno
import fcntl
import hashlib
import json
import math
import os
import shutil
import subprocess
from unittest.mock import MagicMock

import numpy as np
import pytest

from fedemu.device.machine.prepare import SAID
from fedemu.ops.data import corpora
from fedemu.ops.data.apart import decode_apart
from fedemu.ops.data.own.given import store
from fedemu.ops.data.source import DataSource
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import ConfigurationError, DataError, FedemuError


def experiment(**data):
    return Experiment.parse({"data": data})


@pytest.fixture
def digits(tmp_path_factory):
    return corpora.load_corpus(DataSource("digits"), cache=tmp_path_factory.getbasetemp() / "digits-cache")


def test_means_and_deviations_are_those_of_the_training_samples(digits):
    assert digits.mean == pytest.approx([np.mean(digits.train.x, dtype=np.float64)], rel=1e-12)
    assert digits.std == pytest.approx([np.std(digits.train.x, dtype=np.float64)], rel=1e-12)


@pytest.mark.parametrize("size", [3e25, 3e-25, 2.0])
def test_numbers_of_any_size_are_brought_to_a_deviation_of_one(own_cache, size):
    x = np.array([[-size, 1.0], [size, 1.0]] * 50, dtype=np.float32)
    corpus = corpora.open_corpus(experiment(dataset=store((x, [0, 1] * 50), own_cache)))
    assert corpus.std == pytest.approx([size, 1.0], rel=1e-6)
    samples, _ = corpus.batch(corpus.train, np.arange(80))
    assert samples.abs().numpy() == pytest.approx(np.array([[1.0, 0.0]] * 80), abs=1e-6)


def test_an_entry_with_a_deviation_without_an_end_is_made_again(own_cache):
    wanted = experiment(dataset=store((np.array([[-1e25], [1e25]] * 50), [0, 1] * 50), own_cache))
    corpora.open_corpus(wanted)
    (meta,) = own_cache.rglob("meta.json")
    told = {key: value for key, value in json.loads(meta.read_text()).items() if key != "own_digest"}
    meta.write_text(json.dumps(told | {"std": [math.inf]}))
    assert corpora.open_corpus(wanted).std == pytest.approx([1e25], rel=1e-6)


def test_stored_arrays_are_mapped_and_read_only(digits):
    assert isinstance(digits.train.x.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        digits.train.x[0] = 0


def change(path, place, value):
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        file.write(value)


@pytest.mark.parametrize(
    "harm", ["truncate", "remove", "scribble", "nest", "list", "sample", "label", "type", "head", "mean"]
)
@pytest.mark.usefixtures("uncollected")
def test_a_damaged_entry_is_made_again(own_cache, harm):
    digest = corpora.open_corpus(experiment()).digest
    (x,) = own_cache.rglob("train.x.npy")
    y, meta = x.with_name("train.y.npy"), x.with_name("meta.json")
    mean, labels = corpora.open_corpus(experiment()).mean, np.load(y)
    before = {path.name: path.read_bytes() for path in x.parent.iterdir()}
    match harm:
        case "truncate":
            os.truncate(x, 1000)
        case "remove":
            x.unlink()
        case "scribble":
            meta.write_text("{")
        case "nest":
            meta.write_text("[" * 100_000)
        case "list":
            meta.write_text("[]")
        case "sample":
            change(x, -1, b"\x11")
        case "label":
            change(y, -8, bytes([(labels[-1] + 1) % 10]))  # another class
        case "type":
            y.write_bytes(before[y.name].replace(b"<i8", b"<f8"))
        case "head":
            change(y, 10, b"[")  # where its dictionary begins
        case "mean":
            meta.write_text(meta.read_text().replace(f'"mean": [{mean[0]}', f'"mean": [{mean[0] + 1}'))
    assert {path.name: path.read_bytes() for path in x.parent.iterdir()} != before
    again = corpora.open_corpus(experiment())
    assert (again.digest, [*again.mean]) == (digest, [*mean])
    assert {path.name: path.read_bytes() for path in x.parent.iterdir()} == before


LARGE = experiment(dataset="synthetic#90000")


@pytest.fixture(scope="module")
def large_entry(tmp_path_factory):
    """A cache with an entry whose training samples take more than 4 MiB. Copy it before you change it."""
    cache = tmp_path_factory.mktemp("large-cache")
    corpora.load_corpus(DataSource("synthetic#90000"), cache=cache)
    return cache


@pytest.fixture
def large(large_entry, own_cache):
    """The folder of a fresh copy of this entry in the cache of the test. Each file has other times than it had."""
    shutil.copytree(large_entry, own_cache)
    (x,) = own_cache.rglob("train.x.npy")
    return x.parent


def state(path):
    now = path.stat()
    return [now.st_size, now.st_mtime_ns, now.st_ctime_ns]


def compared(entry):
    return json.loads((entry / "compared.json").read_text())


def test_large_samples_are_written_with_a_note_of_the_state_of_their_file(large_entry):
    (x,) = large_entry.rglob("train.x.npy")
    assert x.stat().st_size > 2**22 > x.with_name("test.x.npy").stat().st_size
    assert compared(x.parent) == {"train.x": state(x)}


@pytest.mark.parametrize("noted", ["now", "never", "unreadable"])
def test_large_samples_that_were_overwritten_are_made_again(large, noted):
    x = large / "train.x.npy"
    match noted:
        case "now":
            corpora.open_corpus(LARGE)
            assert compared(large) == {"train.x": state(x)}
        case "never":
            (large / "compared.json").unlink()
        case "unreadable":
            (large / "compared.json").write_text("[" * 100_000)
    before = x.read_bytes()
    change(x, 4096, b"\xff" * 4_000_000)
    again = corpora.open_corpus(LARGE)
    assert x.read_bytes() == before
    assert compared(large) == {"train.x": state(x)}
    assert int((again.train.x == 255).all(axis=(1, 2, 3)).sum()) == 0


@pytest.mark.parametrize("how", ["copied", "touched", "without a note"])
def test_large_samples_of_another_state_are_compared_once_and_used_further(large, how, monkeypatch):
    x = large / "train.x.npy"
    if how != "copied":
        corpora.open_corpus(LARGE)
    if how == "touched":
        os.utime(x, (1, 1))
    if how == "without a note":
        (large / "compared.json").unlink()
    inode = x.stat().st_ino
    corpora.open_corpus(LARGE)
    assert x.stat().st_ino == inode
    assert compared(large) == {"train.x": state(x)}
    monkeypatch.setattr(hashlib, "file_digest", MagicMock(side_effect=AssertionError))
    corpora.open_corpus(LARGE)
    monkeypatch.undo()


def test_in_a_folder_that_cannot_be_written_large_samples_are_not_compared(large, monkeypatch):
    (large / "compared.json").unlink()
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(hashlib, "file_digest", MagicMock(side_effect=AssertionError))
    assert len(corpora.open_corpus(LARGE).train) == 72_000
    assert not (large / "compared.json").exists()


def test_a_note_that_a_full_disk_refuses_is_made_later(large, files_end_at):
    (large / "compared.json").unlink()
    with files_end_at(0):
        assert len(corpora.open_corpus(LARGE).train) == 72_000
    assert sorted(path.name for path in large.iterdir()) == [
        *("meta.json", "test.x.npy", "test.y.npy", "train.x.npy", "train.y.npy")
    ]
    corpora.open_corpus(LARGE)
    assert compared(large) == {"train.x": state(large / "train.x.npy")}


def test_the_leftovers_of_a_killed_process_are_removed(own_cache):
    content = experiment().to_bytes()
    corpora.prepare(content)
    (entry,) = (own_cache / "datasets").glob("digits-*/")
    leftover = entry.with_name(entry.name + ".partial-killed")
    leftover.mkdir()
    (entry / "meta.json").unlink()
    corpora.prepare(content)
    assert not leftover.exists()


def test_a_cache_that_cannot_be_written_is_named(own_cache):
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(ConfigurationError, match=r"cache/datasets cannot be written: Not a dir.*; set FEDEMU_CACHE"):
        corpora.prepare(experiment().to_bytes())


def test_a_cache_in_a_file_system_without_locks_is_named(own_cache, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigurationError, match=r"cache/datasets is in a file system that gives no locks \(Function"):
        corpora.prepare(experiment().to_bytes())


def test_a_cache_in_a_file_system_that_maps_no_files_is_read(own_cache, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(np, "memmap", refuse)
    corpora.prepare(experiment().to_bytes())
    corpus = corpora.open_corpus(experiment())
    assert corpus.train.x.shape == (1437, 1, 8, 8)
    assert not corpus.train.x.flags.writeable


def test_a_full_disk_is_no_fault_of_the_data_also_when_another_process_decodes_them(own_cache, files_end_at):
    refused = pytest.raises(FedemuError, match=r"'digits' can't be stored in .*: File too large, or set")
    with files_end_at(50_000), refused as told:
        decode_apart(experiment(), lambda line: None)
    assert told.value.exit_code == 5
    assert not [*own_cache.glob("datasets/*/")]


@pytest.mark.usefixtures("own_cache")
def test_a_machine_that_starts_no_process_to_decode_in_says_so(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=BlockingIOError(errno.EAGAIN, "")))
    with pytest.raises(ConfigurationError, match="no process can be started on this machine: the limit of processes"):
        decode_apart(experiment(), lambda line: None)


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("code", [0, 3, SAID])
def test_code_that_ends_the_process_that_decodes_is_told(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ends.py").write_text(f"import os\ndef make():\n    os._exit({code})\n")
    said = rf"^the process that decodes ends\.py:make ended with code {code} before it was done; see the lines above$"
    with pytest.raises(DataError, match=said):
        decode_apart(experiment(dataset="ends.py:make"), lambda line: None)
