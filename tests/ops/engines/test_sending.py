"""Data that nodes lack travel as blobs, and arrive whole or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedemu.ops.data.apart import at_hand, decode_apart, entry_here
from fedemu.ops.data.cache import read
from fedemu.ops.data.corpora import SENT, open_corpus
from fedemu.ops.engines import sending
from fedemu.ops.engines.sending import folder_of, offer, receive
from fedemu.ops.experiment import Experiment
from fedemu.ops.experiment.sources import load_experiment
from fedemu.protocol.errors import DataError


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Experiment:
    """An experiment whose data are a file in the folder that this process is in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDEMU_DATA", raising=False)
    rows = [f"{value},{value / 2},{value % 2}" for value in range(40)]
    (tmp_path / "own.csv").write_text("\n".join(["a,b,label", *rows]))
    return load_experiment("digits-small", ["data.dataset=own.csv"], {})[0]


@pytest.fixture
def entry(experiment: Experiment) -> Path:
    """The decoded data."""
    decode_apart(experiment, lambda line: None)
    return entry_here(experiment)


def test_data_in_blobs_arrive_as_they_were(
    entry: Path, experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "BLOB_BYTES", 100)
    blobs: list[bytes] = []
    files = offer(entry, lambda content: blobs.append(content) or len(blobs) - 1)
    assert len(blobs) > len(files)
    assert max(map(len, blobs)) == 100
    there = tmp_path / "node" / "data"
    receive(files, blobs.__getitem__, there)
    receive(files, lambda name: pytest.fail("they are here"), there)
    assert {path.name: path.read_bytes() for path in there.iterdir()} == {
        path.name: path.read_bytes() for path in entry.iterdir()
    }
    (tmp_path / "own.csv").unlink()
    monkeypatch.setenv(SENT, str(there))
    sent = open_corpus(experiment)
    assert sent.digest == read(entry).digest  # type: ignore[union-attr]
    np.testing.assert_array_equal(sent.train.x, read(entry).train.x)  # type: ignore[union-attr]


def test_data_of_which_a_cleaner_has_left_a_part_are_received_again(entry: Path, tmp_path: Path) -> None:
    files = offer(entry, bytes)
    there = tmp_path / "node" / "data"
    receive(files, bytes, there)
    (there / "train.y.npy").unlink()
    assert read(there) is None
    receive(files, bytes, there)
    assert read(there).digest == read(entry).digest  # type: ignore[union-attr]


def test_data_that_change_on_the_way_are_refused_and_leave_nothing(entry: Path, tmp_path: Path) -> None:
    files = offer(entry, bytes)
    there = tmp_path / "node" / "data"
    with pytest.raises(DataError, match=r"meta\.json of the data came with another content than was sent"):
        receive(files, lambda content: content[:-1] + b" " if content.endswith(b"}") else content, there)
    assert [path.name for path in there.parent.iterdir()] == ["data.lock"]


def test_data_that_were_sent_and_are_gone_are_named(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SENT, str(tmp_path / "nothing"))
    with pytest.raises(DataError, match=r"the data that were sent to .*nothing can't be read; run it again"):
        open_corpus(experiment)


def test_a_machine_has_what_it_can_decode_without_the_hub(
    experiment: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert at_hand(experiment)
    assert at_hand(load_experiment("digits-small", [], {})[0])
    assert not at_hand(load_experiment("digits-small", ["data.dataset=someone/something"], {})[0])
    monkeypatch.chdir("/")
    assert not at_hand(experiment)


def test_sent_data_are_in_a_folder_of_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending.tempfile, "gettempdir", lambda: str(tmp_path))
    assert folder_of("0123456789abcdef0123").name == "data-0123456789abcdef"
    [made] = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
