"""Objects that a program hands over are written into the cache by their content, and read by every process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from fedemu.algorithms.data.corpus import Corpus
from fedemu.ops.data import corpora
from fedemu.ops.data.own.given import PREFIX, store
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import DataError

X, Y = np.arange(20.0).reshape(10, 2), np.array([0, 1] * 5)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path))
    return tmp_path


def opened(name: str, **data: Any) -> Corpus:
    return corpora.open_corpus(Experiment.parse({"data": {"dataset": name, **data}}))


def test_a_pair_comes_back_as_it_was(cache: Path) -> None:
    corpus = opened(store(((X, Y), (X[:1] + 0.5, Y[:1])), cache))
    assert corpus.train.x.tolist() == X.tolist()
    assert corpus.train.y.tolist() == Y.tolist()
    assert (corpus.test.x.tolist(), corpus.class_names) == ([[0.5, 1.5]], ("0", "1"))


def test_equal_content_has_one_name_and_other_content_another(cache: Path) -> None:
    names = {store((X, Y), cache), store((X.copy(), Y.tolist()), cache), store(lambda: (X, Y), cache)}
    assert len(names) == 1
    assert {store((X + 1, Y), cache), store((X, 1 - Y), cache)}.isdisjoint(names)
    assert len([*(cache / "objects").iterdir()]) == 3


@pytest.mark.parametrize(
    ("data", "part"), [((X, Y), "1.npy"), (datasets.Dataset.from_dict({"a": X[:, 0], "label": Y}), "train/*.arrow")]
)
def test_an_object_of_which_a_part_is_gone_is_told_and_can_be_handed_over_again(
    data: Any, part: str, cache: Path
) -> None:
    name = store(data, cache)
    (lost,) = (cache / "objects" / name.removeprefix(PREFIX)).glob(part)
    lost.unlink()
    with pytest.raises(DataError, match=r"a program has handed over, are damaged; hand them over again$"):
        opened(name)
    assert store(data, cache) == name
    assert len(opened(name).train) + len(opened(name).test) == len(X)


@pytest.mark.parametrize("place", [8, 100, -1], ids=["length", "head", "number"])
def test_an_object_of_which_a_byte_has_changed_is_told(place: int, cache: Path) -> None:
    name = store((X, Y), cache)
    file = cache / "objects" / name.removeprefix(PREFIX) / "0.npy"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"a program has handed over, are damaged; hand them over again$"):
        opened(name)


def test_what_a_killed_process_has_left_goes_with_the_next_object(cache: Path) -> None:
    killed = (
        "import os; from pathlib import Path; import numpy as np; from fedemu.ops.data.own import given\n"
        "given._digest = lambda folder: os.kill(os.getpid(), 9)\n"
        f"given.store((np.zeros((4, 2)), np.array([0, 1, 0, 1])), Path({str(cache)!r}))"
    )
    assert subprocess.run([sys.executable, "-c", killed], timeout=60).returncode == -9
    assert [path.name.partition("-")[0] for path in (cache / "objects").iterdir()] == ["partial"]
    name = store((X, Y), cache)
    assert [path.name for path in (cache / "objects").iterdir()] == [name.removeprefix(PREFIX)]


def test_names_of_classes_and_columns_are_kept(cache: Path) -> None:
    made = {"x": X, "y": Y, "class_names": ["no", "yes"], "columns": {"who": [*"aabbccddee"]}}
    corpus = opened(store(made, cache), id_column="who", test_by="id", test_fraction=0.5)
    assert corpus.class_names == ("no", "yes")
    assert sorted([*corpus.train.columns["who"], *corpus.test.columns["who"]]) == [*"aabbccddee"]


def test_a_table_keeps_its_columns_and_its_name_does_not_change(cache: Path) -> None:
    def table() -> datasets.Dataset:
        return datasets.Dataset.from_dict({"a": X[:, 0], "label": [["no", "yes"][y] for y in Y]})

    names = {store(table(), cache), store(datasets.DatasetDict(train=table()), cache)}
    assert len(names) == 1
    corpus = opened(names.pop())
    assert (corpus.class_names, corpus.input_shape) == (("no", "yes"), (1,))
    assert sorted([*corpus.train.x[:, 0], *corpus.test.x[:, 0]]) == X[:, 0].tolist()


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_empty_split_of_a_table_is_named(split: str, cache: Path) -> None:
    table = datasets.Dataset.from_dict({"a": X[:, 0], "label": Y})
    with pytest.raises(DataError, match=f"^the split {split} of data is empty; "):
        store(datasets.DatasetDict({"train": table, "test": table, split: table.select([])}), cache)


def test_an_object_that_is_not_there_is_named(cache: Path) -> None:
    with pytest.raises(DataError, match=f"the data of '{PREFIX}0123', which a program has handed over, are not in"):
        opened(f"{PREFIX}0123")
