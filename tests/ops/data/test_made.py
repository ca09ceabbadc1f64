"""Data sets that come as whole arrays: the built-in ones, and a user's own function."""

import importlib
import random
import shutil
import sys

import numpy as np
import pytest
import torch

from fedemu.ops.data import corpora
from fedemu.ops.data.apart import decode_apart
from fedemu.ops.data.source import DataSource
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import DataError


def experiment(**data):
    return Experiment.parse({"data": data})


@pytest.fixture
def digits(tmp_path_factory):
    return corpora.load_corpus(DataSource("digits"), cache=tmp_path_factory.getbasetemp() / "digits-cache")


def test_digits_are_the_1797_images_with_a_stratified_fifth_as_the_test_split(digits):
    assert (len(digits.train), len(digits.test), digits.classes) == (1437, 360, 10)
    assert digits.input_shape == (1, 8, 8)
    assert digits.train.x.dtype == np.uint8
    assert (digits.train.x.min(), digits.train.x.max()) == (0, 16)
    counts = np.bincount(digits.test.y)
    assert counts.tolist() == [36, 37, 35, 37, 36, 36, 36, 36, 35, 36]
    # The first image of the file is the familiar zero.
    first = next(x for x in (*digits.test.x, *digits.train.x) if x[0, 0].tolist() == [0, 0, 5, 13, 9, 1, 0, 0])
    assert first[0, 1].tolist() == [0, 0, 13, 15, 10, 15, 5, 0]


def test_the_synthetic_data_set_has_the_size_asked_for_and_can_be_told_apart_by_class(tmp_path):
    corpus = corpora.load_corpus(DataSource("synthetic#1000"), cache=tmp_path)
    assert (len(corpus.train), len(corpus.test), corpus.input_shape) == (800, 200, (1, 8, 8))
    centres = np.stack([corpus.train.x[corpus.train.y == label].mean(axis=0) for label in range(10)])
    distances = ((corpus.test.x[:, None].astype(float) - centres) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == corpus.test.y).mean() > 0.9


@pytest.mark.parametrize("name", ["synthetic#5", "synthetic#many", "digits#100"])
def test_a_wrong_size_of_a_built_in_data_set_is_refused(name, tmp_path):
    with pytest.raises(DataError, match="only synthetic#N takes a size"):
        corpora.load_corpus(DataSource(name), cache=tmp_path)


def test_a_function_of_ones_own_returns_arrays(own_data):
    corpus = own_data(
        "return dict(x=np.arange(12).reshape(4, 3) / 2, y=[0, 1, 1, 0], test_x=np.ones((1, 3)), test_y=[1],"
        "class_names=['no', 'yes'], columns={'who': [['a'], ['b'], ['a'], ['c']], 'age': [1]},"
        "test_columns={'who': ['c'], 'age': [1, 2]})"
    )
    assert corpus.name == "make"
    assert corpus.class_names == ("no", "yes")
    assert corpus.train.x.tolist() == [[0, 0.5, 1], [1.5, 2, 2.5], [3, 3.5, 4], [4.5, 5, 5.5]]
    assert corpus.train.x.dtype == np.float32
    assert {name: column.tolist() for name, column in corpus.train.columns.items()} == {"who": ["a", "b", "a", "c"]}
    assert {name: column.tolist() for name, column in corpus.test.columns.items()} == {"who": ["c"]}
    assert corpus.mean.tolist() == [2.25, 2.75, 3.25]
    assert corpus.test.y.tolist() == [1]


def test_labels_that_are_words_are_numbered_in_the_order_of_the_class_names(own_data):
    corpus = own_data(
        "return dict(x=[[0.0]] * 3, y=['low', 'high', 'mid'], test_x=[[0.0]], test_y=['high'],"
        "class_names=['low', 'mid', 'high', 'none'], columns={'who': [1] * 3})",
        "ordered",
    )
    assert corpus.class_names == ("low", "mid", "high", "none")
    assert (corpus.train.y.tolist(), corpus.test.y.tolist()) == ([0, 2, 1], [2])


def test_a_function_is_called_again_if_its_module_is_in_another_folder_or_imports_another_text(
    tmp_path, monkeypatch, own_cache
):
    def first_value(folder, value):
        """The first number of the data of a module whose text is always the same."""
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / folder)
        (tmp_path / folder / "of_data.py").write_text("import its_values\ndef make():\n    return its_values.PAIR\n")
        (tmp_path / folder / "its_values.py").write_text(f"PAIR = [[{value}.5]] * 9, [0] * 9\n")
        for name in ("of_data", "its_values"):
            sys.modules.pop(name, None)
        monkeypatch.setattr(sys, "path", [str(tmp_path / folder), *sys.path])
        importlib.invalidate_caches()
        return corpora.open_corpus(experiment(dataset="of_data:make")).train.x[0, 0]

    assert first_value("one", 1) == 1.5
    assert first_value("other", 1) == 1.5
    assert len([*own_cache.glob("datasets/make-*/")]) == 2
    assert first_value("other", 22) == 22.5  # a text of another length, which Python compiles anew


def test_a_function_without_a_test_split_gets_a_stratified_one(own_data):
    corpus = own_data(
        "return dict(x=np.zeros((10, 1, 2, 2), np.uint8), y=[0, 1] * 5, columns={'who': range(10)})", "no_test"
    )
    assert (len(corpus.train), len(corpus.test)) == (8, 2)
    assert sorted([*corpus.train.columns["who"], *corpus.test.columns["who"]]) == list(range(10))
    # All pixels are equal: the deviation 0 counts as 1.
    assert corpus.std.tolist() == [1.0]


@pytest.mark.filterwarnings("error::RuntimeWarning")  # a warning of numpy would name a line of fedemu
@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return 3", "holds no data set but int; give a pair"),
        ("return dict(x=[[1]], y=[0], z=0)", "returned x, y, z"),
        ("return dict(x=[[1]], y=[0], test_x=[[1]])", "returned test_x, x, y"),
        ("return dict(x=[1], y=[0])", r"x of int64 \[1\]"),
        ("return dict(x=[[1]], y=[0.5])", r"labels of float64; labels are whole numbers, which y\.astype\(int\) makes"),
        ("return dict(x=[[1], [2]], y=[0.0, np.nan])", "has the label nan in row 1, which is no class"),
        ("return dict(x=[[1], [2]], y=[0])", "2 samples in x and 1 label in y; give one label for each sample"),
        ("return dict(x=[[1], [2]], y=[[0, 1], [1, 0]])", r"y of int64 \[2, 2\]"),
        ("return dict(x=np.zeros((0, 2)), y=np.zeros(0, int))", "has no samples"),
        ("return dict(x=np.zeros((9, 0)), y=[0] * 9, columns=dict(who=[1] * 9))", r"shape \[0\] hold no numbers"),
        ("return dict(x=[[np.nan]], y=[0])", "not finite"),
        ("return dict(x=[[1]], y=[-1])", "negative label"),
        ("return dict(x=[[1]], y=np.array([2**63], np.uint64))", f"has the label {2**63}, beyond int64; number"),
        ("return dict(x=[[1e39]], y=[0])", "not finite, or too large for float32, in row 0 of x"),
        ("return dict(x=[[1]], y=[0])", "has no column 'who' of 1 values"),
        (
            "return dict(x=[[1]] * 3, y=[0] * 3, columns={'who': [1, 2]})",
            "the column 'who' of the data set bad_data:[a-z]+ has 2 values for 3 samples; give one for each",
        ),
        (
            "return dict(x=[[1]] * 3, y=[0] * 3, columns={'who': [[1, 2]] * 3})",
            "the column 'who' of the data set bad_data:[a-z]+ has 3 × 2 values for 3 samples; give one for each",
        ),
        (
            "return dict(x=[[1]], y=[2], class_names=['a', 'b'], columns={'who': [1]})",
            "has the label 2, but 2 class names",
        ),
        (
            "return dict(x=[[1]], y=[0], test_x=[[0.5]], test_y=[0], columns={'who': [1]})",
            "training samples are whole numbers, but test samples fractions; give both in one type",
        ),
        (
            "return dict(x=[[1]], y=['c'], class_names=['a', 'b'], columns={'who': [1]})",
            "has the label 'c', which is none of its class names a, b",
        ),
        ("raise RuntimeError('no disk')", "failed with RuntimeError: no disk"),
    ],
)
def test_a_function_that_returns_no_data_set_is_told_why(own_data, body, complaint):
    with pytest.raises(DataError, match=complaint):
        own_data(body, "bad_data")


def test_a_function_or_module_that_does_not_exist_is_named(own_cache):
    with pytest.raises(DataError, match="names a module 'no_such_module' that can't be found"):
        corpora.open_corpus(experiment(dataset="no_such_module:make"))
    with pytest.raises(DataError, match="names a module '__main__' that can't be found"):
        corpora.open_corpus(experiment(dataset="__main__:make"))
    with pytest.raises(DataError, match="no_such_function"):
        corpora.open_corpus(experiment(dataset="json:no_such_function"))


def test_any_object_may_be_named_in_a_module_or_in_a_file(tmp_path, own_cache):
    file = tmp_path / "forms.py"
    file.write_text(
        "import numpy as np\n"
        "pair = (np.arange(8.0).reshape(4, 2), ['b', 'a', 'b', 'a'])\n"
        "def tokens():\n    return ((np.array([[7, 9], [8, -2**63]]), [0, 1]), (np.array([[2**40, 1]]), [0]))\n"
        "def wrong():\n    return pair[0], [0, -1, 0, 0]\n"
        "def broken():\n    return [][1]\n"
        "def long():\n    return pair[0], [0, 10**15, 0, 0]\n"
    )
    corpus = corpora.open_corpus(experiment(dataset=f"{file}:pair", test_fraction=0.5))
    assert (corpus.class_names, corpus.input_shape) == (("a", "b"), (2,))
    names = [corpus.class_names[label] for label in corpus.train.y]
    both = {(0.0, 1.0): "b", (2.0, 3.0): "a", (4.0, 5.0): "b", (6.0, 7.0): "a"}
    assert names == [both[tuple(x)] for x in corpus.train.x.tolist()]
    tokens = corpora.open_corpus(experiment(dataset=f"{file}:tokens"))
    assert (tokens.train.x.tolist(), tokens.test.x.tolist()) == ([[7, 9], [8, -(2**63)]], [[2**40, 1]])
    assert tokens.batch(tokens.test, np.array([0]))[0].tolist() == [[2**40, 1]]
    with pytest.raises(DataError, match=r"data\.image_size goes with tables and images of columns, not with arrays"):
        corpora.open_corpus(experiment(dataset=f"{file}:pair", image_size=8))
    with pytest.raises(DataError, match="has the negative label -1 in row 1; labels count from 0"):
        corpora.open_corpus(experiment(dataset=f"{file}:wrong"))
    with pytest.raises(DataError, match=r"has the label 10{15}, .* number the 2 that it has from 0, or give words"):
        corpora.open_corpus(experiment(dataset=f"{file}:long"))
    with pytest.raises(
        DataError, match=r"failed with IndexError: list index out of range, .*forms\.py:8\n.*forms\.py:8 in"
    ):
        corpora.open_corpus(experiment(dataset=f"{file}:broken"))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("label_column", "data.label_column"),
        ("image_column", "data.image_column"),
        ("id_column", "the setting that names it"),
    ],
)
def test_a_column_that_a_built_in_data_set_has_not_is_refused(setting, said, tmp_path):
    with pytest.raises(DataError, match=f"the data set 'digits' has no column 'nope'; leave out {said}, for"):
        corpora.load_corpus(corpora.source_of(experiment(dataset="digits", **{setting: "nope"}).data), cache=tmp_path)
    by_label = experiment(dataset="digits", partition={"kind": "natural", "column": "label"}).data
    with pytest.raises(DataError, match="neither people nor devices are told apart by labels; leave out"):
        corpora.load_corpus(corpora.source_of(by_label), cache=tmp_path)
    named = corpora.source_of(experiment(dataset="synthetic#100", label_column="label").data)
    assert len(corpora.load_corpus(named, cache=tmp_path).train) == 80


DRAWING = """
import random
import numpy as np
import torch

def drawn(n):
    return np.stack([np.random.normal(size=n), [random.random() for _ in range(n)], torch.rand(n).numpy()], 1)

pair = drawn(40), np.random.randint(0, 2, 40)

def called():
    return drawn(40), np.random.randint(0, 2, 40)

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return drawn(1)[0], index % 2
"""


@pytest.mark.parametrize("name", ["pair", "called", "Items"])
def test_what_a_module_draws_is_the_same_at_each_decoding(name, tmp_path, monkeypatch, own_cache):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawing.py").write_text(DRAWING)
    wanted = experiment(dataset=f"drawing.py:{name}")
    torch.manual_seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    digest = corpora.prepare(wanted.to_bytes())
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    # Now this process has imported the module, and has drawn.
    _ = random.random(), np.random.normal(), torch.rand(1)
    shutil.rmtree(own_cache)
    assert corpora.prepare(wanted.to_bytes()) == digest


def test_what_a_module_draws_is_the_same_in_the_process_that_decodes_before_a_run(tmp_path, monkeypatch, own_cache):
    """It imports the module anew, and torch by it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drawing.py").write_text(DRAWING)
    wanted = experiment(dataset="drawing.py:pair")
    digest = corpora.prepare(wanted.to_bytes())
    shutil.rmtree(own_cache)
    decode_apart(wanted, lambda line: None)
    assert corpora.open_corpus(wanted).digest == digest
