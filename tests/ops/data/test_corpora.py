import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedemu.ops.assembly.partition import build_partition
from fedemu.ops.data import cache as datasets_cache
from fedemu.ops.data import corpora as datasets
from fedemu.ops.data.source import DataSource
from fedemu.ops.data.split import stratified
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import ConfigurationError, DataError

DIGITS_DIGEST = "d0d0d09b3a1215a3217414f961d7570e6a34c1bc165dac2eebb1cd900c1ffabe"


def experiment(**data):
    return Experiment.parse({"data": data})


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """A cache of this test's own, and no folder of data sets."""
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDEMU_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def digits(tmp_path_factory):
    return datasets.load_corpus(DataSource("digits"), cache=tmp_path_factory.getbasetemp() / "digits-cache")


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


def test_digits_have_one_digest_on_every_machine(digits):
    assert digits.digest == DIGITS_DIGEST


def test_digits_are_decoded_without_the_heavy_libraries(own_cache):
    code = (
        "import sys; from fedemu.ops.data import corpora; from fedemu.ops.experiment import Experiment;"
        "corpora.prepare(Experiment().to_bytes());"
        "print([name for name in ('torch', 'sklearn', 'datasets', 'pyarrow', 'flwr_datasets') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_means_and_deviations_are_those_of_the_training_samples(digits):
    assert digits.mean == pytest.approx([np.mean(digits.train.x, dtype=np.float64)], rel=1e-12)
    assert digits.std == pytest.approx([np.std(digits.train.x, dtype=np.float64)], rel=1e-12)


def test_preparing_stores_once_and_tells_the_digest_of_what_is_loaded(own_cache):
    calls = []
    content = experiment(dataset="digits").to_bytes()
    first = datasets.prepare(content, lambda done, total: calls.append((done, total)))
    stored = {path: path.stat().st_mtime_ns for path in own_cache.rglob("*") if path.is_file()}
    second = datasets.prepare(content, lambda done, total: calls.append((done, total)))
    assert first == second == datasets.load(content).digest
    assert {path: path.stat().st_mtime_ns for path in own_cache.rglob("*") if path.is_file()} == stored
    assert calls == [(1437, 1797), (1797, 1797)]


def test_stored_arrays_are_mapped_and_read_only(digits):
    assert isinstance(digits.train.x.base, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        digits.train.x[0] = 0


def test_several_processes_may_prepare_at_once(own_cache):
    code = (
        "from fedemu.ops.data import corpora; from fedemu.ops.experiment import Experiment;"
        "print(corpora.prepare(Experiment().to_bytes()))"
    )
    together = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    digests = [process.communicate(timeout=60)[0].strip() for process in together]
    assert digests == [DIGITS_DIGEST] * 4
    assert len(list((own_cache / "datasets").glob("digits-*/meta.json"))) == 1
    assert not list((own_cache / "datasets").glob("*partial*"))


@pytest.mark.parametrize("harm", ["truncate", "remove", "scribble"])
def test_a_damaged_entry_is_made_again(own_cache, harm):
    content = experiment().to_bytes()
    digest = datasets.prepare(content)
    (x,) = own_cache.rglob("train.x.npy")
    match harm:
        case "truncate":
            os.truncate(x, 1000)
        case "remove":
            x.unlink()
        case "scribble":
            x.with_name("meta.json").write_text("{")
    again = datasets.load(content)
    assert again.digest == digest
    assert len(again.train.x) == 1437


def test_what_a_killed_process_left_behind_is_swept_up(own_cache):
    content = experiment().to_bytes()
    datasets.prepare(content)
    (entry,) = (own_cache / "datasets").glob("digits-*/")
    leftover = entry.with_name(entry.name + ".partial-killed")
    leftover.mkdir()
    (entry / "meta.json").unlink()
    datasets.prepare(content)
    assert not leftover.exists()


def test_a_cache_that_can_not_be_written_is_named(own_cache):
    own_cache.write_text("a file where the folder should be")
    with pytest.raises(ConfigurationError, match=r"the cache folder .* can't be written .*; set FEDEMU_CACHE"):
        datasets.prepare(experiment().to_bytes())


def test_the_cache_is_where_the_environment_says():
    assert datasets_cache.cache_folder({"FEDEMU_CACHE": "/a"}) == Path("/a")
    assert datasets_cache.cache_folder({"XDG_CACHE_HOME": "/b"}) == Path("/b/fedemu")
    assert datasets_cache.cache_folder({}) == Path.home() / ".cache" / "fedemu"


# The test split that is taken where a data set has none


def test_a_stratified_part_is_the_ceiling_shared_by_largest_remainder():
    y = np.array([0] * 10 + [1] * 6 + [2] * 5)
    chosen = stratified(y, 0.25)
    # A quarter of 21 is 5.25, so six: 2.5 + 1.5 + 1.25 of the classes; halves go to the lower label first.
    assert np.bincount(y[chosen]).tolist() == [3, 2, 1]
    assert (chosen == stratified(y, 0.25)).all()


def test_a_class_keeps_a_sample_for_training():
    y = np.array([0, 1, 1, 1, 1])
    assert np.bincount(y[~stratified(y, 0.9)]).tolist() == [1, 1]


def test_a_test_split_that_can_not_be_taken_is_an_error():
    with pytest.raises(DataError, match="no test split can be taken from 2 samples of 2 classes"):
        stratified(np.array([0, 1]), 0.5)


# A user's own function


@pytest.fixture
def own_data(tmp_path, monkeypatch, own_cache):
    """Writes a module with a function ``make`` and names it as a data set."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(body, name="my_data"):
        (tmp_path / f"{name}.py").write_text(f"import numpy as np\ndef make():\n    {body}\n")
        sys.modules.pop(name, None)
        return datasets.load(experiment(dataset=f"{name}:make", id_column="who").to_bytes())

    return write


def test_a_function_of_ones_own_returns_arrays(own_data):
    corpus = own_data(
        "return dict(x=np.arange(12).reshape(4, 3) / 2, y=[0, 1, 1, 0], test_x=np.ones((1, 3)), test_y=[1],"
        "class_names=['no', 'yes'], columns={'who': ['a', 'b', 'a', 'c']})"
    )
    assert corpus.name == "make"
    assert corpus.class_names == ("no", "yes")
    assert corpus.train.x.tolist() == [[0, 0.5, 1], [1.5, 2, 2.5], [3, 3.5, 4], [4.5, 5, 5.5]]
    assert corpus.train.x.dtype == np.float32
    assert corpus.train.columns["who"].tolist() == ["a", "b", "a", "c"]
    assert corpus.mean.tolist() == [2.25, 2.75, 3.25]
    assert corpus.test.y.tolist() == [1]


def test_a_function_without_a_test_split_gets_a_stratified_one(own_data):
    corpus = own_data(
        "return dict(x=np.zeros((10, 1, 2, 2), np.uint8), y=[0, 1] * 5, columns={'who': range(10)})", "no_test"
    )
    assert (len(corpus.train), len(corpus.test)) == (8, 2)
    assert sorted([*corpus.train.columns["who"], *corpus.test.columns["who"]]) == list(range(10))
    # All pixels are equal: the deviation 0 counts as 1.
    assert corpus.std.tolist() == [1.0]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return 3", "must return a mapping with at least x and y"),
        ("return dict(x=[[1]], y=[0], z=0)", "returned x, y, z"),
        ("return dict(x=[[1]], y=[0], test_x=[[1]])", "returned test_x, x, y"),
        ("return dict(x=[1], y=[0])", r"x of int64 \[1\]"),
        ("return dict(x=[[1]], y=[0.5])", r"y of float64 \[1\]"),
        ("return dict(x=[[1], [2]], y=[0])", r"y of int64 \[1\]"),
        ("return dict(x=np.zeros((0, 2)), y=np.zeros(0, int))", r"\[0, 2\]"),
        ("return dict(x=[[np.nan]], y=[0])", "not finite"),
        ("return dict(x=[[1]], y=[-1])", "negative label"),
        ("return dict(x=[[1]], y=[0])", "has no column 'who' of 1 values"),
        ("return dict(x=[[1]], y=[2], class_names='ab', columns={'who': [1]})", "has the label 2, but 2 class names"),
        ("raise RuntimeError('no disk')", "failed with RuntimeError: no disk"),
    ],
)
def test_a_function_that_returns_no_data_set_is_told_why(own_data, body, complaint):
    with pytest.raises(DataError, match=complaint):
        own_data(body, "bad_data")


def test_a_function_or_module_that_does_not_exist_is_named(own_cache):
    with pytest.raises(DataError, match="names a module 'no_such_module' that can't be found"):
        datasets.load(experiment(dataset="no_such_module:make").to_bytes())
    with pytest.raises(DataError, match="names a module '__main__' that can't be found"):
        datasets.load(experiment(dataset="__main__:make").to_bytes())
    with pytest.raises(DataError, match="no_such_function"):
        datasets.load(experiment(dataset="json:no_such_function").to_bytes())


# Partitions of an experiment


def divided(corpus, devices=5, seed=1, **data):
    return build_partition(corpus, experiment(**data).data, devices=devices, seed=seed)


@pytest.mark.parametrize(
    ("partition", "sizes"),
    [
        ({"kind": "iid"}, [288, 288, 287, 287, 287]),
        ({"kind": "dirichlet_equal", "alpha": 0.1}, [288, 288, 287, 287, 287]),
    ],
)
def test_the_configured_partition_is_built(digits, partition, sizes):
    built = divided(digits, partition=partition)
    assert np.diff(built.train_offsets).tolist() == sizes
    assert sorted(built.train_indices) == list(range(1437))


def test_dirichlet_leaves_no_device_of_a_large_fleet_empty(digits):
    built = divided(digits, devices=300, partition={"kind": "dirichlet", "alpha": 0.1, "min_samples": 1})
    assert np.diff(built.train_offsets).min() == 1
    assert sorted(built.train_indices) == list(range(1437))


def test_shards_limit_the_classes_of_a_device(digits):
    built = divided(digits, devices=50, partition={"kind": "shards", "per_device": 2})
    assert max(len(np.unique(digits.train.y[built.device(i)[0]])) for i in range(50)) == 2


def test_a_partition_follows_from_the_seed_alone(digits):
    first, same, other = (divided(digits, seed=seed, validation=0.1).to_arrays() for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], same[name]) for name in first)
    assert not np.array_equal(first["train_indices"], other["train_indices"])


def test_validation_is_held_back_at_each_device(digits):
    built = divided(digits, partition={"kind": "iid"}, validation=0.1)
    assert np.diff(built.validation_offsets).tolist() == [28] * 5
    assert sorted([*built.train_indices, *built.validation_indices]) == list(range(1437))


def test_natural_ids_become_devices(own_data):
    corpus = own_data(
        "return dict(x=np.zeros((6, 1)), y=[0, 1] * 3, test_x=[[0]], test_y=[0], columns={'who': list('cabcab')})"
    )
    built = divided(corpus, devices=3, partition={"kind": "natural", "column": "who"})
    assert [built.device(i)[0].tolist() for i in range(3)] == [[1, 4], [2, 5], [0, 3]]


def test_the_digest_covers_samples_labels_and_columns(own_data):
    base = (
        "dict(x=np.zeros((2, 1), np.uint8), y=[0, 1], test_x=np.zeros((1, 1), np.uint8), test_y=[0], "
        "columns={'who': [1, 2]})"
    )
    changes = [
        "",
        "{'x': np.ones((2, 1), np.uint8)}",
        "{'y': [1, 0]}",
        "{'columns': {'who': [1, 3]}}",
        "{'test_y': [1]}",
    ]
    digests = [
        own_data(f"return {base} | {change or '{}'}", f"variant{place}").digest for place, change in enumerate(changes)
    ]
    assert len(set(digests)) == len(changes)
    assert own_data(f"return {base}", "same_content").digest == digests[0]
    assert all(json.dumps(digest) and len(digest) == 64 for digest in digests)


def test_the_synthetic_data_set_has_the_size_asked_for_and_can_be_told_apart_by_class(tmp_path):
    corpus = datasets.load_corpus(DataSource("synthetic#1000"), cache=tmp_path)
    assert (len(corpus.train), len(corpus.test), corpus.input_shape) == (800, 200, (1, 8, 8))
    centres = np.stack([corpus.train.x[corpus.train.y == label].mean(axis=0) for label in range(10)])
    distances = ((corpus.test.x[:, None].astype(float) - centres) ** 2).sum(axis=(2, 3, 4))
    assert (distances.argmin(axis=1) == corpus.test.y).mean() > 0.9


@pytest.mark.parametrize("name", ["synthetic#5", "synthetic#many", "digits#100"])
def test_a_wrong_size_of_a_built_in_data_set_is_refused(name, tmp_path):
    with pytest.raises(DataError, match="only synthetic#N takes a size"):
        datasets.load_corpus(DataSource(name), cache=tmp_path)
