"""The readers on data sets that users bring, in small files of their standard forms: CIFAR-100, CINIC-10, FEMNIST."""

import json
import os
import string
from dataclasses import fields
from pathlib import Path

import datasets as hugging_face
import numpy as np
import pytest
from PIL import Image

from fedemu.ops.assembly.partition import build_partition
from fedemu.ops.data import readers
from fedemu.ops.data.corpora import load_corpus, source_of
from fedemu.ops.data.source import DataSource, TextSource
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import ConfigurationError, DataError

PNG = hugging_face.Image()
TEXTS = TextSource("next", 10, 100, "characters")


@pytest.fixture
def opened(tmp_path):
    """Opens a folder of this test as a data set."""

    def open_it(name, **settings):
        return load_corpus(DataSource(name, **settings), cache=tmp_path / "cache", data=tmp_path)

    return open_it


def picture(value, side=32, colour=True):
    """A picture whose first pixel is ``value``. The second pixel has a colour, if ``colour`` is true."""
    pixels = np.full((side, side, 3), 255, np.uint8)
    pixels[0, 0] = value
    if colour:
        pixels[0, 1] = (250, 10, 20)
    return Image.fromarray(pixels if colour else pixels[..., 0])


def write_parquet(folder, features, **splits):
    folder.mkdir()
    for split, columns in splits.items():
        made = hugging_face.Dataset.from_dict(columns, features=hugging_face.Features(features))
        made.to_parquet(folder / f"{split}-00000-of-00001.parquet")


def told(split):
    """The value of the first pixel of each picture."""
    return split.x[:, 0, 0, 0].tolist()


# CIFAR-100


def test_cifar100_is_learnt_by_its_fine_labels_unless_the_coarse_ones_are_asked_for(tmp_path, opened):
    fine, coarse = (hugging_face.ClassLabel(num_classes=n) for n in (100, 20))
    columns = {"img": [picture(n) for n in range(4)], "fine_label": [3, 0, 99, 50], "coarse_label": [19, 0, 3, 3]}
    features = {"img": PNG, "fine_label": fine, "coarse_label": coarse}
    write_parquet(tmp_path / "cifar100", features, train=columns, test=columns)
    corpus = opened("cifar100")
    assert (corpus.input_shape, corpus.classes) == ((3, 32, 32), 100)
    assert (corpus.train.y.tolist(), told(corpus.train)) == ([3, 0, 99, 50], [0, 1, 2, 3])
    assert opened("cifar100", label_column="coarse_label").train.y.tolist() == [19, 0, 3, 3]


# CINIC-10


def cinic_parquet(folder):
    label = hugging_face.ClassLabel(names=["airplane", "automobile"])
    splits = {
        split: {"image": [picture(10 * place + n) for n in range(3)], "label": [0, 1, 0]}
        for place, split in enumerate(("train", "validation", "test"))
    }
    write_parquet(folder, {"image": PNG, "label": label}, **splits)


def cinic_folders(folder):
    for place, split in enumerate(("train", "valid", "test")):
        for name, numbers in (("airplane", (0, 2)), ("automobile", (1,))):
            (folder / split / name).mkdir(parents=True)
            for n in numbers:
                picture(10 * place + n).save(folder / split / name / f"cifar10-{split}-{n}.png")


@pytest.mark.parametrize("write", [cinic_parquet, cinic_folders])
def test_cinic10_is_read_from_parquet_and_from_folders_and_its_validation_split_can_be_merged(tmp_path, opened, write):
    write(tmp_path / "cinic10")
    corpus = opened("cinic10")
    assert corpus.class_names == ("airplane", "automobile")
    assert (sorted(told(corpus.train)), sorted(told(corpus.test))) == ([0, 1, 2], [20, 21, 22])
    merged = opened("cinic10", train_split="train+validation")
    assert sorted(told(merged.train)) == [0, 1, 2, 10, 11, 12]
    assert sorted(told(merged.test)) == [20, 21, 22]
    # An odd number is an automobile.
    assert (merged.train.y == np.array(told(merged.train)) % 10 % 2).all()


def test_a_split_that_does_not_exist_is_named_with_those_that_do(tmp_path, opened):
    cinic_parquet(tmp_path / "cinic10")
    with pytest.raises(DataError, match="has no split 'valid'; its splits are train, validation, test"):
        opened("cinic10", train_split="train + valid")
    with pytest.raises(DataError, match=r"'digits' has no splits to choose from; leave out data\.train_split"):
        opened("digits", train_split="train")


# FEMNIST

WRITERS = {"f0001_41": 6, "f0000_14": 2, "f0002_05": 8}
"""Samples by writer."""


def femnist_parquet(folder):
    names = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]
    count = sum(WRITERS.values())
    columns = {
        "image": [picture(n, 28, colour=False) for n in range(count)],
        "writer_id": [writer for writer, samples in WRITERS.items() for _ in range(samples)],
        "hsf_id": [0] * count,
        "character": [n % 62 for n in range(count)],
    }
    types = [PNG, hugging_face.Value("string"), hugging_face.Value("int64"), hugging_face.ClassLabel(names=names)]
    write_parquet(folder, dict(zip(columns, types, strict=True)), train=columns)


def leaf_file(path, start, **samples):
    """Write a file in LEAF's form with a number of samples for each writer.

    Samples are numbered from ``start``, and the first pixel of a sample is its number.
    """
    users, number = {}, start
    for user, count in samples.items():
        numbers = range(number, number + count)
        users[user] = {"x": [[n / 255, *[1.0] * 783] for n in numbers], "y": [n % 62 for n in numbers]}
        number += count
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"users": [*users], "num_samples": [*samples.values()], "user_data": users}
    path.write_text(json.dumps(content))


def femnist_leaf(folder):
    leaf_file(folder / "all_data_0.json", 0, f0001_41=6, f0000_14=2)
    leaf_file(folder / "all_data_1.json", 8, f0002_05=8)


def femnist_leaf_as_it_is_made(folder):
    leaf_file(folder / "all_data" / "all_data_0.json", 0, **WRITERS)


@pytest.mark.parametrize("write", [femnist_parquet, femnist_leaf, femnist_leaf_as_it_is_made])
def test_femnist_has_62_classes_of_grey_images_and_its_writers_as_a_column(tmp_path, opened, write):
    write(tmp_path / "femnist")
    corpus = opened("femnist", columns=("writer_id",), test_by="writer_id", test_fraction=0.25)
    assert (corpus.input_shape, corpus.classes, corpus.train.x.dtype) == ((1, 28, 28), 62, np.uint8)
    assert (corpus.class_names[9], corpus.class_names[10], corpus.class_names[61]) == ("9", "A", "z")
    assert sorted(told(corpus.train) + told(corpus.test)) == list(range(16))
    for split in (corpus.train, corpus.test):
        assert split.y.tolist() == told(split)
        numbered = [writer for writer, samples in WRITERS.items() for _ in range(samples)]
        assert split.columns["writer_id"].tolist() == [numbered[n] for n in told(split)]
        assert (split.x[:, 0, 0, 1:] == 255).all()


@pytest.mark.parametrize("backwards", [False, True])
def test_all_forms_of_femnist_are_the_same_data_however_the_system_lists_their_files(
    tmp_path, opened, monkeypatch, backwards
):
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, names: sorted(glob(folder, names), reverse=backwards))
    digests = set()
    for write in (femnist_parquet, femnist_leaf, femnist_leaf_as_it_is_made):
        write(tmp_path / write.__name__)
        digests.add(opened(write.__name__, columns=("writer_id",), test_by="writer_id").digest)
    assert len(digests) == 1


def test_a_test_split_by_id_is_a_part_of_everybody(tmp_path, opened):
    femnist_leaf(tmp_path / "femnist")
    corpus = opened("femnist", columns=("writer_id",), test_by="writer_id", test_fraction=0.25)
    # A quarter of 16 is 4: 1.5 + 0.5 + 2, of which the halves go to the first name that can spare one.
    assert np.unique(corpus.test.columns["writer_id"], return_counts=True)[1].tolist() == [1, 1, 2]


def test_ids_with_few_samples_are_left_out_of_both_splits(tmp_path, opened):
    femnist_leaf(tmp_path / "femnist")
    ids = {"columns": ("writer_id",), "test_by": "writer_id", "id_column": "writer_id", "test_fraction": 0.25}
    corpus = opened("femnist", **ids, id_min_samples=6)
    assert sorted(told(corpus.train) + told(corpus.test)) == [*range(6), *range(8, 16)]
    with pytest.raises(DataError, match="none of the 3 values of 'writer_id' has 9 samples, the largest has 8; lower"):
        opened("femnist", **ids, id_min_samples=9)


def test_the_train_and_test_folders_of_leaf_are_the_splits_and_ids_count_in_both(tmp_path, opened, monkeypatch):
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda folder, names: sorted(glob(folder, names), reverse=True))
    leaf_file(tmp_path / "femnist" / "train" / "all_data_0_niid_05_keep_0_train_9.json", 0, a=3)
    leaf_file(tmp_path / "femnist" / "train" / "all_data_1_niid_05_keep_0_train_9.json", 3, b=2)
    leaf_file(tmp_path / "femnist" / "test" / "all_data_0_niid_05_keep_0_test_9.json", 100, a=1, b=1)
    corpus = opened("femnist", columns=("writer_id",))
    assert (told(corpus.train), told(corpus.test)) == ([0, 1, 2, 3, 4], [100, 101])
    large = opened("femnist", columns=("writer_id",), id_column="writer_id", id_min_samples=4)
    assert (told(large.train), told(large.test)) == ([0, 1, 2], [100])


@pytest.mark.parametrize(
    ("users", "complaint"),
    [
        ({"a": {"x": [[0.5] * 783], "y": [0]}}, "samples of 'a' in .* are not 784 numbers from 0 to 1 each"),
        ({"a": {"x": [[1.5] * 784], "y": [0]}}, "samples of 'a' in .* are not 784 numbers from 0 to 1 each"),
        ({"a": {"x": [[0.5] * 784], "y": [62]}}, "labels of 'a' in .* are not whole numbers from 0 to 61"),
        ({"a": {"x": [[0.5] * 784], "y": [0, 1]}}, "samples of 'a' in .* are not 784 numbers from 0 to 1 each"),
        ({"a": {"x": [[0.5] * 784], "y": [0, 1, 2]}}, "is not in LEAF's form: cannot reshape array of size 784"),
        ({"a": {"y": [0]}}, "is not in LEAF's form: no 'x'"),
        ({}, "holds no samples"),
    ],
)
def test_a_file_that_only_begins_like_leaf_is_told_why(tmp_path, opened, users, complaint):
    (tmp_path / "femnist").mkdir()
    content = {"users": [*users], "num_samples": [], "user_data": users}
    (tmp_path / "femnist" / "all_data_0.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=complaint):
        opened("femnist")


def test_columns_that_leaf_does_not_have_are_named(tmp_path, opened):
    femnist_leaf(tmp_path / "femnist")
    with pytest.raises(DataError, match="has no such column 'alphabet'; its images are x, its labels y"):
        opened("femnist", columns=("alphabet",))


# Which reader


@pytest.mark.parametrize(
    ("name", "settings", "complaint"),
    [
        ("digits", {"train_split": "train"}, "'digits' has no splits to choose from; leave out data.train_split"),
        ("digits", {"image_size": 8}, "data.image_size goes with folders and hub data sets of images, not with 'dig"),
        ("json:loads", {"regroup": "superimagenet-s"}, "data.regroup goes with folders and hub data sets of images"),
        ("femnist", {"text": TEXTS}, "'femnist' holds no texts; set data.text.kind = 'none'"),
        ("lines.txt", {}, "'lines.txt' is a file of texts; set data.text.kind to what is to be predicted of them"),
        ("lines.txt", {"text": TEXTS, "image_size": 8}, "data.image_size goes with folders and hub data sets"),
    ],
)
def test_a_setting_that_the_reader_does_not_follow_is_refused(tmp_path, opened, name, settings, complaint):
    femnist_leaf(tmp_path / "femnist")
    (tmp_path / "lines.txt").write_text("one\ntwo\n")
    with pytest.raises(DataError, match=complaint):
        opened(name, **settings)


def test_every_setting_is_followed_by_some_reader():
    followed = frozenset().union(*(reader.follows for reader in readers.READERS))
    assert followed == readers.SETTINGS.keys() <= {field.name for field in fields(DataSource)}


# From the settings of an experiment


def data_of(**data):
    return Experiment.parse({"data": data}).data


def test_the_settings_of_an_experiment_reach_the_source():
    natural = {"kind": "natural", "column": "writer_id"}
    made = source_of(data_of(partition=natural, test_by="id", id_min_samples=50, train_split="train+validation"))
    assert (made.columns, made.test_by, made.id_column) == (("writer_id",), "writer_id", "writer_id")
    assert (made.id_min_samples, made.train_split) == (50, "train+validation")
    other = source_of(data_of(partition=natural, id_column="hsf_id", test_by="id"))
    assert (other.columns, other.test_by, other.id_column) == (("hsf_id", "writer_id"), "hsf_id", None)


@pytest.mark.parametrize("setting", [{"test_by": "id"}, {"id_min_samples": 5}])
def test_settings_about_ids_need_a_column_of_them(setting):
    with pytest.raises(ConfigurationError, match=r"^data\.\w+ = .* needs a column that tells people apart; set"):
        data_of(**setting)


def test_a_column_that_a_built_in_data_set_lacks_is_named(opened):
    with pytest.raises(DataError, match="'digits' has no column 'writer'"):
        opened("digits", columns=("writer",))


# The real data sets

needs_data = pytest.mark.skipif("FEDEMU_DATA" not in os.environ, reason="FEDEMU_DATA names no folder of data sets")


@pytest.fixture
def real(tmp_path_factory):
    """Opens a data set of FEDEMU_DATA with the settings of an experiment."""

    def open_it(name, **settings):
        folder = Path(os.environ["FEDEMU_DATA"])
        if not (folder / name).is_dir():
            pytest.skip(f"FEDEMU_DATA has no {name}")
        data = data_of(dataset=name, **settings)
        cache = tmp_path_factory.getbasetemp() / "brought"
        return data, load_corpus(source_of(data), cache=cache, data=folder)

    return open_it


@needs_data
def test_the_subset_of_cifar100_is_read_by_fine_labels(real):
    _, corpus = real("cifar100_subset")
    assert (len(corpus.train), len(corpus.test), corpus.input_shape) == (12_000, 2_500, (3, 32, 32))
    assert np.bincount(corpus.train.y).tolist() == [120] * 100
    assert "apple" in corpus.class_names


@needs_data
def test_the_writers_of_omniglot_become_devices_of_which_each_is_tested(real):
    data, corpus = real("omniglot", partition={"kind": "natural", "column": "writer"}, test_by="id", id_min_samples=30)
    writers, tested = np.unique(corpus.test.columns["writer"], return_counts=True)
    assert set(corpus.train.columns["writer"]) == set(writers)
    everyone = np.unique([*corpus.train.columns["writer"], *corpus.test.columns["writer"]], return_counts=True)[1]
    assert everyone.min() >= 30
    assert np.abs(tested - 0.2 * everyone).max() < 1
    built = build_partition(corpus, data, devices=len(writers), seed=1)
    for device, writer in enumerate(writers):
        assert set(corpus.train.columns["writer"][built.device(device)[0]]) == {writer}
