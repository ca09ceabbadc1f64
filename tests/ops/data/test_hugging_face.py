"""Hugging Face folders that the tests write themselves, and the real ones where FEDEMU_DATA names them."""

import io
import json
import os
import re
import socket
import time
from datetime import datetime
from pathlib import Path

import datasets as hugging_face
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedemu.ops.data.corpora import load_corpus
from fedemu.ops.data.hugging_face import _reachable, decode_table, open_tables, read_texts
from fedemu.ops.data.source import DataSource, TextSource, entry_of, locate
from fedemu.ops.data.texts import decode_columns
from fedemu.protocol.errors import DataError

RED, GREY, WHITE = (250, 10, 20), (90, 90, 90), (255, 255, 255)


def image(colour, mode="RGB", size=(3, 2)):
    """The bytes of an image of one colour, given as RGB."""
    file = io.BytesIO()
    made = Image.new(mode, size) if mode == "I;16" else Image.new("RGB", size, colour).convert(mode)
    made.save(file, "PNG")
    return file.getvalue()


def write_parquet(path, columns, features):
    """A parquet file as ``datasets`` writes it: image cells as bytes and path, features in the metadata."""
    hints = json.dumps({"info": {"features": features}})
    arrays = {
        name: pa.array(
            [None if v is None else {"bytes": v, "path": None} for v in values],
            pa.struct([("bytes", pa.binary()), ("path", pa.string())]),
        )
        if features[name]["_type"] == "Image"
        else pa.array(values)
        for name, values in columns.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(arrays).replace_schema_metadata({"huggingface": hints}), path)


IMAGE, LABEL = {"_type": "Image"}, {"_type": "ClassLabel", "names": ["cat", "dog"]}


@pytest.fixture
def open_folder(tmp_path):
    """Opens a folder of this test as a data set."""

    def open_it(name="pets", **settings):
        return load_corpus(DataSource(name, **settings), cache=tmp_path / "cache", data=tmp_path)

    return open_it


@pytest.fixture
def pets(tmp_path):
    """Writes the training and test splits of a small data set of images."""

    def write(train, test=((WHITE, 1),), mode="RGB", **more):
        for split, rows in (("train", train), ("test", test)):
            columns = {"img": [image(colour, mode) for colour, _ in rows], "label": [label for _, label in rows]}
            extra = {name: (values, feature) for name, (values, feature) in more.items() if split == "train"}
            columns |= {name: values for name, (values, _) in extra.items()}
            features = {"img": IMAGE, "label": LABEL} | {name: feature for name, (_, feature) in extra.items()}
            if rows:
                write_parquet(tmp_path / "pets" / f"{split}-00000-of-00001.parquet", columns, features)

    return write


# Images


def test_colour_images_become_channels_first_bytes(pets, open_folder):
    pets([(RED, 0), (GREY, 1)])
    corpus = open_folder()
    assert corpus.name == "pets"
    assert corpus.input_shape == (3, 2, 3)
    assert corpus.class_names == ("cat", "dog")
    assert corpus.train.x[0].tolist() == [[[250] * 3] * 2, [[10] * 3] * 2, [[20] * 3] * 2]
    assert corpus.train.y.tolist() == [0, 1]
    assert corpus.test.x[0, :, 0, 0].tolist() == [255, 255, 255]
    assert corpus.mean.tolist() == [170.0, 50.0, 55.0]
    assert corpus.std.tolist() == [80.0, 40.0, 35.0]


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "LA"])
def test_images_without_colour_get_one_channel_however_they_are_stored(pets, open_folder, mode):
    pets([(WHITE, 0), ((0, 0, 0), 1)], mode=mode)
    corpus = open_folder()
    assert corpus.input_shape == (1, 2, 3)
    assert corpus.train.x[:, 0, 0, 0].tolist() == [255, 0]


@pytest.mark.parametrize("colour", [(250, 250, 20), (250, 10, 250)])
def test_one_coloured_image_late_in_the_test_split_gives_all_three_channels(pets, open_folder, colour):
    pets([(GREY, 0), (WHITE, 1)], test=[(GREY, 0), (colour, 0)])
    corpus = open_folder()
    assert corpus.train.x[:, :, 0, 0].tolist() == [[90, 90, 90], [255, 255, 255]]
    assert corpus.test.x[1, :, 0, 0].tolist() == [*colour]


def test_a_folder_of_images_takes_its_classes_from_its_folders(tmp_path, open_folder):
    for split, label, colour in (("train", "cat", RED), ("train", "dog", GREY), ("test", "dog", WHITE)):
        folder = tmp_path / "pets" / split / label
        folder.mkdir(parents=True)
        (folder / "0.png").write_bytes(image(colour))
    corpus = open_folder()
    assert corpus.class_names == ("cat", "dog")
    assert corpus.train.x[:, 0, 0, 0].tolist() == [250, 90]
    assert corpus.test.y.tolist() == [1]
    for split in ("train", "test"):
        (tmp_path / "pets" / split / "dog").rename(tmp_path / "pets" / split / "fox")
    assert open_folder().class_names == ("cat", "fox"), "though its files are the same as before"


def test_a_data_set_that_was_saved_to_disk_is_read_too(tmp_path, open_folder):
    features = hugging_face.Features(x=hugging_face.Value("float32"), label=hugging_face.ClassLabel(names=["a", "b"]))
    split = hugging_face.Dataset.from_dict({"x": [1.0, 2.0], "label": [0, 1]}, features=features)
    hugging_face.DatasetDict(train=split, test=split).save_to_disk(tmp_path / "pets")
    corpus = open_folder()
    assert corpus.train.x.tolist() == [[1.0], [2.0]]


def test_many_images_keep_their_order_across_blocks(pets, open_folder):
    rows = [((i % 256, i // 256, 7), i % 2) for i in range(300)]
    pets(rows)
    corpus = open_folder()
    assert corpus.train.x[:, :, 0, 0].tolist() == [list(colour) for colour, _ in rows]


def test_nothing_is_left_beside_the_entry(tmp_path, pets, open_folder):
    pets([(RED, 0), (GREY, 1)])
    open_folder()
    kinds = sorted(path.suffix or "entry" for path in (tmp_path / "cache" / "datasets").iterdir())
    assert kinds in (["entry", ".lock"], [".lock", "entry"])


# Splits and columns


def test_a_data_set_without_a_test_split_gets_a_stratified_one_that_keeps_rows_together(pets, open_folder):
    rows = [((i, 100, 200), i % 2) for i in range(20)]
    pets(rows, test=(), writer=([f"w{i}" for i in range(20)], {"_type": "Value", "dtype": "string"}))
    corpus = open_folder(columns=("writer",))
    assert (len(corpus.train), len(corpus.test)) == (16, 4)
    assert np.bincount(corpus.test.y).tolist() == [2, 2]
    for split in (corpus.train, corpus.test):
        first_channel = split.x[:, 0, 0, 0]
        assert (split.y == first_channel % 2).all()
        assert split.columns["writer"].tolist() == [f"w{i}" for i in first_channel]


def test_several_label_columns_are_named_and_one_has_to_be_chosen(tmp_path, open_folder):
    coarse = {"_type": "ClassLabel", "names": ["animal"]}
    columns = {"img": [image(RED), image(GREY)], "fine": [0, 1], "coarse": [0, 0]}
    features = {"img": IMAGE, "fine": LABEL, "coarse": coarse}
    for split in ("train", "test"):
        write_parquet(tmp_path / "pets" / f"{split}.parquet", columns, features)
    with pytest.raises(DataError, match="several columns of labels, fine, coarse; set"):
        open_folder()
    assert open_folder(label_column="coarse").class_names == ("animal",)
    assert open_folder(label_column="fine").digest != open_folder(label_column="coarse").digest


@pytest.mark.parametrize("setting", ["image_column", "label_column"])
def test_a_column_that_does_not_exist_is_named_with_those_that_do(pets, open_folder, setting):
    pets([(RED, 0)])
    with pytest.raises(DataError, match="has no column 'colour'; its columns are img, label"):
        open_folder(**{setting: "colour"})


def test_an_id_column_that_does_not_exist_is_named(pets, open_folder):
    pets([(RED, 0)])
    with pytest.raises(DataError, match="has no column 'writer'"):
        open_folder(columns=("writer",))


def test_a_label_that_is_no_class_is_named(pets, open_folder):
    pets([(RED, 0), (RED, -1)])
    with pytest.raises(DataError, match="the label column 'label' of 'pets' holds -1, which is none of its 2 classes"):
        open_folder()


def write_csv(tmp_path, **files):
    (tmp_path / "pets").mkdir()
    for name, text in files.items():
        (tmp_path / "pets" / f"{name}.csv").write_text(text)


def test_columns_of_numbers_become_features_and_texts_become_classes(tmp_path, open_folder):
    write_csv(
        tmp_path,
        train="weight,legs,tame,kind,label\n1.5,4,True,a,dog\n2.5,2,False,b,bird\n",
        test="weight,legs,tame,kind,label\n9.0,8,False,a,ant\n",
    )
    corpus = open_folder(columns=("kind",))
    assert corpus.train.x.tolist() == [[1.5, 4.0, 1.0], [2.5, 2.0, 0.0]]
    assert corpus.class_names == ("ant", "bird", "dog")
    assert (corpus.train.y.tolist(), corpus.test.y.tolist()) == ([2, 1], [0])
    assert corpus.input_shape == (3,)
    assert corpus.train.columns["kind"].tolist() == ["a", "b"]


def test_whole_numbers_as_labels_are_classes_in_numerical_order(tmp_path, open_folder):
    write_csv(tmp_path, train="x,target\n1,10\n2,9\n", test="x,target\n3,10\n")
    corpus = open_folder()
    assert corpus.class_names == ("9", "10")
    assert corpus.train.y.tolist() == [1, 0]


def test_a_shuffled_test_split_without_class_labels_is_read_in_its_order():
    table = hugging_face.Dataset.from_dict({"a": [1.0, 2.0, 3.0], "label": ["x", "y", "x"]})
    opened = hugging_face.DatasetDict(train=table, test=table.select([2, 1]))
    decoded = decode_table(DataSource("mine:made"), opened, grey=True)
    assert decoded.class_names == ("x", "y")
    assert decoded.test.y.tolist() == [0, 1]


@pytest.mark.parametrize(("least", "tested"), [(0, [1, 2]), (-1, [0])])
def test_a_test_split_of_secret_labels_is_passed_over_unless_its_label_is_trained_on(least, tested):
    parts = {"train": [least, 1, 2], "validation": [1, 2], "test": [-1]}
    opened = {name: hugging_face.Dataset.from_dict({"a": [1.0] * len(y), "label": y}) for name, y in parts.items()}
    decoded = decode_table(DataSource("mine:made"), hugging_face.DatasetDict(opened), grey=True)
    assert decoded.test.y.tolist() == tested


CATS, MORE = hugging_face.ClassLabel(names=["ant", "cat", "dog"]), hugging_face.ClassLabel(names=["dog", "cat"])


def labelled(labels, feature, column="a"):
    features = hugging_face.Features({column: hugging_face.Value("float32"), "label": feature})
    return hugging_face.Dataset.from_dict({column: [1.0] * len(labels), "label": labels}, features=features)


@pytest.mark.parametrize(
    ("train", "test"),
    [
        (labelled([2, 1, 0], CATS), labelled([0, 1], MORE)),
        (labelled([2, 1, 0], CATS), labelled(["dog", "cat"], hugging_face.Value("string"))),
        (labelled(["dog", "cat", "ant"], hugging_face.Value("string")), labelled([0, 1], MORE)),
    ],
)
def test_classes_that_the_test_split_numbers_otherwise_are_found_by_their_names(train, test):
    decoded = decode_table(DataSource("mine:made"), hugging_face.DatasetDict(train=train, test=test), grey=True)
    assert decoded.class_names == ("ant", "cat", "dog")
    assert (decoded.train.y.tolist(), decoded.test.y.tolist()) == ([2, 1, 0], [2, 1])


@pytest.mark.parametrize(
    ("test", "complaint"),
    [
        (labelled([0, 1], hugging_face.ClassLabel(names=["cat", "owl"])), "has the class 'owl', which is none of"),
        (labelled([0, -1], MORE), "holds -1, which is none of its 2 classes"),
        (labelled([0, 1], CATS, "b"), "the test split of 'mine:made' has no column 'a'; its columns are b, label"),
    ],
)
def test_a_test_split_that_does_not_go_with_the_training_split_is_told_why(test, complaint):
    opened = hugging_face.DatasetDict(train=labelled([2, 1, 0], CATS), test=test)
    with pytest.raises(DataError, match=complaint):
        decode_table(DataSource("mine:made"), opened, grey=True)


def test_columns_without_numbers_are_told():
    rows = {"a": [0.5, 1.5, 2.5], "city": ["x", "y", "z"], "label": [0, 1, 0]}
    opened = hugging_face.DatasetDict(
        train=hugging_face.Dataset.from_dict(rows), test=hugging_face.Dataset.from_dict(rows)
    )
    assert decode_table(DataSource("mine:made"), opened, grey=True).left_out == ("city",)


def write_lines(tmp_path, rows):
    (tmp_path / "pets").mkdir()
    for split in ("train", "test"):
        (tmp_path / "pets" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def test_splits_to_train_on_whose_columns_have_other_types_are_told_why():
    words = labelled(["dog", "cat"], hugging_face.Value("string"))
    opened = hugging_face.DatasetDict(train=labelled([2, 1, 0], CATS), more=words, test=labelled([0], CATS))
    with pytest.raises(DataError, match="the splits train and more of 'mine:made' have other columns"):
        decode_table(DataSource("mine:made", train_split="train+more"), opened, grey=True)


def test_the_class_of_a_text_is_told_by_its_name_and_a_secret_one_is_empty():
    columns, _, declared = read_texts(DataSource("t"), hugging_face.DatasetDict(train=labelled([1, -1, None, 0], MORE)))
    assert columns["label"] == ["cat", None, None, "dog"]
    assert declared == {"train": {"label": ["dog", "cat"]}}


def texts_of(train, test, **settings):
    """The data set of texts that two tables of texts and labels make. Each is a pair of labels and their feature."""

    def table(labels, feature):
        features = hugging_face.Features({"text": hugging_face.Value("string"), "label": feature})
        cells = {"text": ["ab"] * len(labels), "label": labels}
        return hugging_face.Dataset.from_dict(cells, features=features)

    source = DataSource("t", text=TextSource("labels", 8, 60, "characters"), **settings)
    opened = hugging_face.DatasetDict(train=table(*train), test=table(*test))
    return decode_columns(source, source.text, *read_texts(source, opened))


@pytest.mark.parametrize(
    "names", [["world", "sports", "business", "science"], ["1", "01", "1.0", "+1"], ["2.5", "1.5", "0.5", "9"]]
)
def test_texts_have_the_classes_that_the_data_set_declares(names):
    backwards = hugging_face.ClassLabel(names=names[::-1])
    for test in (([3, 2], backwards), (names[:2], hugging_face.Value("string"))):
        decoded = texts_of(([0, 1, 2, 0], hugging_face.ClassLabel(names=names)), test)
        assert decoded.class_names == tuple(names)
        assert (decoded.train.y.tolist(), decoded.test.y.tolist()) == ([0, 1, 2, 0], [0, 1])


def test_labels_of_texts_are_numbers_in_both_splits_if_they_are_in_the_training_split():
    polarity = hugging_face.ClassLabel(names=["neg", "pos"])
    decoded = texts_of(([1, 0, 1], hugging_face.Value("int64")), ([1, 0], polarity))
    assert decoded.class_names == ("0", "1")
    assert (decoded.train.y.tolist(), decoded.test.y.tolist()) == ([1, 0, 1], [1, 0])
    named = texts_of((["pos", "neg"], hugging_face.Value("string")), ([1, 0], polarity))
    assert (named.class_names, named.train.y.tolist(), named.test.y.tolist()) == (("neg", "pos"), [1, 0], [1, 0])


def test_splits_of_texts_that_are_joined_have_the_classes_of_all():
    joined = texts_of(([2, 0], CATS), ([0, 1], MORE), train_split="train+test", test_fraction=0.4)
    assert joined.class_names == ("ant", "cat", "dog")
    assert sorted([*joined.train.y, *joined.test.y]) == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("test", "complaint"),
    [
        (([1], hugging_face.ClassLabel(names=["cat", "owl"])), "holds 'owl', which is none of the 3 classes of the tr"),
        ((["dog "], hugging_face.Value("string")), "the label column 'label' of 't' holds 'dog ', which is none of"),
    ],
)
def test_a_label_of_a_text_that_the_training_split_does_not_declare_is_told(test, complaint):
    with pytest.raises(DataError, match=complaint):
        texts_of(([2, 1, 0], CATS), test)


def test_a_number_of_a_class_of_texts_that_is_too_large_is_told():
    features = hugging_face.Features({"text": hugging_face.Value("string"), "label": MORE})
    table = pa.table({"text": ["a", "b"], "label": pa.array([0, 2])}, schema=features.arrow_schema)
    with pytest.raises(DataError, match="the label column 'label' of 't' holds 2, which is none of its 2 classes"):
        read_texts(DataSource("t"), hugging_face.DatasetDict(train=hugging_face.Dataset(table)))


def test_a_column_of_vectors_is_taken_as_it_is(tmp_path, open_folder, monkeypatch):
    monkeypatch.setattr("fedemu.ops.data.columns._ROWS", 2)
    signals = [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[9, 10], [11, 12]]]
    write_lines(tmp_path, [{"signal": signal, "size": 1, "label": "a"} for signal in signals])
    assert open_folder().train.x.tolist() == signals


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_dates_and_times_of_a_kept_column_are_seconds_since_1970(tmp_path, open_folder, unit):
    moments = [datetime(1970, 1, 2, 0, 0, 1), datetime(2025, 3, 1, 12), datetime(1969, 12, 31)]
    table = pa.table(
        {
            "signal": [[1.0], [2.0], [3.0]],
            "label": ["a", "b", "a"],
            "at": pa.array(moments, pa.timestamp(unit)),
            "zoned": pa.array(moments, pa.timestamp(unit, "Europe/Berlin")),
            "day": pa.array([moment.date() for moment in moments], pa.date32()),
        }
    )
    (tmp_path / "pets").mkdir()
    for split in ("train", "test"):
        pq.write_table(table, tmp_path / "pets" / f"{split}.parquet")
    columns = open_folder(columns=("at", "zoned", "day")).train.columns
    assert columns["at"].tolist() == columns["zoned"].tolist() == [86401.0, 1740830400.0, -86400.0]
    assert columns["day"].tolist() == [86400.0, 1740787200.0, -86400.0]


@pytest.mark.parametrize(
    ("signals", "settings", "complaint"),
    [
        ([[1, 2], [3], [4, 5]], {}, r"row 2 of .* vector \[1\] in .*'signal', where the rows before have \[2\]; make"),
        ([[1, 2], [3, 4], [5]], {}, r"row 3 of .* vector \[1\] in .*'signal', where the rows before have \[2\]; make"),
        ([[1, 2], [3, 4], [5, 6]], {"label_column": "signal"}, "'signal' of 'pets' should hold one number or text per"),
        ([[1, 2], [3], [4, 5]], {"columns": ("signal",)}, "'signal' of 'pets' should hold one number or text per row"),
    ],
)
def test_vectors_that_cannot_be_used_are_told_why(tmp_path, open_folder, monkeypatch, signals, settings, complaint):
    monkeypatch.setattr("fedemu.ops.data.columns._ROWS", 2)
    write_lines(tmp_path, [{"signal": signal, "size": 1, "label": "a"} for signal in signals])
    with pytest.raises(DataError, match=complaint):
        open_folder(**settings)


def test_one_of_several_columns_of_vectors_has_to_be_chosen(tmp_path, open_folder):
    write_lines(tmp_path, [{"left": [1, 2], "right": [3, 4], "size": 5, "label": "a"}])
    with pytest.raises(DataError, match=r"several columns of vectors, left, right; set data\.image_column$"):
        open_folder()
    assert open_folder(image_column="right").train.x.tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("files", "settings", "complaint"),
    [
        ({"train": "x,y\n1,2\n"}, {}, "no column of labels among x, y; set data.label_column"),
        ({"train": "x,label\na,b\n"}, {}, "no such column among x, label; set data.image_column"),
        (
            {"train": "x,label\na,b\n", "test": "x,label\na,b\n"},
            {"image_column": "x"},
            "the column x of 'pets' holds neither images nor numbers",
        ),
        ({"train": "x,label\n1,0.5\n2,1.5\n"}, {}, "holds fractions, not classes; name another by data.label_column"),
        (
            {"train": "x,label\n1,a\n2,\n", "test": "x,label\n1,a\n"},
            {},
            "the column 'label' of 'pets' is empty in row 2",
        ),
        (
            {"train": "x,label\n1,a\n,b\n", "test": "x,label\n1,a\n"},
            {},
            r"row 2 of 'pets' has no finite number \(float32\) in the column 'x', but None",
        ),
        (
            {"train": "x,label\n1,a\n1e39,b\n", "test": "x,label\n1,a\n"},
            {},
            r"row 2 of 'pets' has no finite number \(float32\) in the column 'x', but 1e\+39",
        ),
        ({"train": "x,label\n1,a\n", "test": "x,label\n"}, {}, "the split test of 'pets' is empty"),
        ({"test": "x,label\n1,a\n", "validation": "x,label\n1,a\n"}, {}, "has no split train; its splits are"),
        ({"train": "x,label\n1,a\n2,b\n"}, {}, "no test split can be taken from 2 samples of 2 classes"),
    ],
)
def test_tables_that_cannot_be_used_are_told_why(tmp_path, open_folder, files, settings, complaint):
    write_csv(tmp_path, **files)
    with pytest.raises(DataError, match=complaint):
        open_folder(**settings)


def test_rows_of_a_table_in_one_piece_name_their_splits(tmp_path, open_folder):
    write_csv(tmp_path, train="x,label,split\n1,a,train\n2,b,train\n3,a,test\n4,b,val\n")
    corpus = open_folder()
    assert (corpus.train.x.tolist(), corpus.test.x.tolist()) == ([[1], [2]], [[3]])
    with pytest.raises(DataError, match="the data set 'pets' has no split 'dev'; its splits are train, test, val"):
        open_folder(train_split="dev")
    table = hugging_face.Dataset.from_dict({"text": ["a", "b", "c"], "split": ["test", "train", "train"]})
    columns, splits, _ = read_texts(DataSource("t"), hugging_face.DatasetDict(train=table))
    assert sorted(zip(columns["text"], splits, strict=True)) == [("a", "test"), ("b", "train"), ("c", "train")]
    assert read_texts(DataSource("t"), hugging_face.DatasetDict(train=table.select([0])))[1] == ["train"]


def test_a_row_that_does_not_fit_is_named_by_its_place_in_the_file_also_if_tests_are_set_apart(
    tmp_path, open_folder, monkeypatch
):
    monkeypatch.setattr("fedemu.ops.data.columns._ROWS", 2)
    write_csv(tmp_path, train="x,label\n" + "".join(f"{row},{row % 2}\n" for row in range(9)) + ",1\n")
    with pytest.raises(DataError, match="row 10 of 'pets' has no finite number"):
        open_folder()


# What is broken


def test_a_link_to_a_folder_elsewhere_is_refused_because_its_images_would_be_left_out(tmp_path, open_folder):
    for folder in ("pets/train/ant", "pets/train/cat", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
        for number in range(2):
            (tmp_path / folder / f"{number}.png").write_bytes(image(RED))
    (tmp_path / "pets" / "again").symlink_to(tmp_path / "pets" / "train")
    (tmp_path / "pets" / "train" / "bee").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match=f"{tmp_path}/pets/train/bee is a link to a folder, and such links"):
        open_folder()
    (tmp_path / "pets" / "train" / "bee").unlink()
    assert open_folder().class_names == ("ant", "cat")


def test_an_image_that_cannot_be_decoded_is_named_by_its_row(tmp_path, open_folder):
    for split, cells in (("train", [image(RED), b"not an image"]), ("test", [image(RED)])):
        columns = {"img": cells, "label": [0, 1][: len(cells)]}
        write_parquet(tmp_path / "pets" / f"{split}.parquet", columns, {"img": IMAGE, "label": LABEL})
    with pytest.raises(DataError, match=r"the image in row 2 of 'pets' can't be decoded: cannot identify image file$"):
        open_folder()
    assert not list((tmp_path / "cache" / "datasets").glob("*partial*"))


@pytest.mark.parametrize(
    ("cell", "complaint"),
    [
        (None, "the image in row 2 of 'pets' can't be decoded: there is none"),
        (image(RED)[:50], "the image in row 2 of 'pets' can't be decoded"),
        (
            image(RED, size=(5, 2)),
            "the images of 'pets' differ in size: 3 x 2 first, 5 x 2 in row 2 of 'pets'; set data.image_size",
        ),
        (image(RED, mode="I;16"), "pixels of mode I;16 don't fit eight bits"),
    ],
)
def test_an_image_that_does_not_fit_is_named_by_its_row(tmp_path, open_folder, cell, complaint):
    columns = {"img": [image(RED), cell], "label": [0, 1]}
    for split in ("train", "test"):
        write_parquet(tmp_path / "pets" / f"{split}.parquet", columns, {"img": IMAGE, "label": LABEL})
    with pytest.raises(DataError, match=complaint):
        open_folder()


def test_a_corrupt_file_is_one_sentence(tmp_path, pets, open_folder):
    pets([(RED, 0), (GREY, 1)])
    (tmp_path / "pets" / "train-00000-of-00001.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match="the data set 'pets' can't be read: ") as caught:
        open_folder()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [None, TextSource("labels", 8, 50, "characters")])
def test_a_text_that_is_no_utf_8_is_named_by_its_column(tmp_path, text):
    lines = [f'{{"text": "one {row}", "x": {row}, "label": "word {row % 2}"}}'.encode() for row in range(9)]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines).replace(b"word 1", b"w\xf2rd 1", 1))
    with pytest.raises(DataError, match=r"the column 'label' of '.*rows.jsonl' holds a text that is not in UTF-8"):
        load_corpus(DataSource(str(tmp_path / "rows.jsonl"), text=text), cache=tmp_path / "cache")


def test_files_of_different_columns_are_told_with_their_columns(tmp_path, open_folder):
    (tmp_path / "pets").mkdir()
    for name, columns in (("one", "a,label"), ("two", "b,kind")):
        (tmp_path / "pets" / f"{name}.csv").write_text(f"{columns}\n1,x\n")
    with pytest.raises(DataError, match=r"^the data set 'pets' can't be read: [^\n]*$") as caught:
        open_folder()
    assert all(re.search(rf"\b{name}\b", str(caught.value).split("read: ")[1]) for name in ("a", "label", "b", "kind"))


def test_an_empty_file_of_json_lines_is_told(tmp_path, open_folder):
    (tmp_path / "pets").mkdir()
    (tmp_path / "pets" / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"^the data set .pets. has a file without any rows; "):
        open_folder()


def test_an_empty_folder_is_one_sentence(tmp_path, open_folder):
    (tmp_path / "pets").mkdir()
    with pytest.raises(DataError, match="the data set 'pets' can't be read: ") as caught:
        open_folder()
    assert "\n" not in str(caught.value)


def test_one_of_several_configurations_has_to_be_chosen(tmp_path, open_folder):
    write_csv(tmp_path, first="x,label\n1,a\n2,a\n", second="x,label\n3,b\n4,b\n")
    names = "- config_name: one\n  data_files: first.csv\n- config_name: two\n  data_files: second.csv\n"
    (tmp_path / "pets" / "README.md").write_text(f"---\nconfigs:\n{names}---\n")
    with pytest.raises(DataError, match=r"several configurations, one, two; choose one, as in pets#one"):
        open_folder()
    assert open_folder("pets#two").class_names == ("b",)


def test_changed_files_are_decoded_again(pets, open_folder):
    pets([(RED, 0), (GREY, 1)])
    first = open_folder()
    pets([(RED, 0), (GREY, 0)])
    assert open_folder().digest != first.digest


# Where a name leads


def test_the_folder_of_data_sets_comes_before_the_working_folder(tmp_path, pets, monkeypatch):
    pets([(RED, 0), (GREY, 1)])
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "pets").mkdir(parents=True)
    monkeypatch.chdir(elsewhere)
    assert len(load_corpus(DataSource("pets"), cache=tmp_path / "cache", data=tmp_path).train) == 2
    monkeypatch.chdir(tmp_path)
    assert len(load_corpus(DataSource("./pets"), cache=tmp_path / "cache").train) == 2
    assert len(load_corpus(DataSource(str(tmp_path / "pets")), cache=tmp_path / "other").train) == 2


def test_a_folder_that_does_not_exist_is_named_at_every_place(tmp_path):
    with pytest.raises(
        DataError, match=r"no folder /nowhere/no/such/pets or no/such/pets, and it is no Hugging Face id"
    ):
        load_corpus(DataSource("./no/such/pets"), cache=tmp_path / "cache", data=Path("/nowhere"))


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """The hub is at a port of this machine where nobody listens, and nothing was downloaded before."""
    monkeypatch.setattr(hugging_face.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hugging_face.config, "HF_DATASETS_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize("name", ["no-such-folder", "somebody/no-such-data"])
def test_a_hub_id_without_a_network_fails_at_once_in_one_sentence(tmp_path, no_hub, name):
    before = time.monotonic()
    with pytest.raises(
        DataError, match=f"there is no folder '{name}', and the Hugging Face hub can't be reached"
    ) as caught:
        load_corpus(DataSource(name), cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - before < 10
    assert not hugging_face.config.HF_HUB_OFFLINE


@pytest.mark.parametrize("form", ["http://127.0.0.1:{}", "127.0.0.1:{}"])
def test_the_hub_is_looked_for_behind_a_proxy_if_it_is_not_excepted(no_hub, monkeypatch, form):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", form.format(proxy.getsockname()[1]))
        assert _reachable("http://127.0.0.1:9")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert not _reachable("http://127.0.0.1:9")


def test_a_data_set_that_is_nowhere_is_told_with_every_folder_that_was_looked_for(tmp_path, no_hub):
    place = locate("no-such-data", tmp_path / "data")
    with pytest.raises(DataError, match=f"there is no folder '{tmp_path}/data/no-such-data' or 'no-such-data', and"):
        open_tables(DataSource("no-such-data"), place, tmp_path)


def test_where_a_data_set_was_looked_for_does_not_change_where_it_is_stored(tmp_path):
    source = DataSource("somebody/data")
    entries = {entry_of(source, locate(source.dataset, data), tmp_path) for data in (None, tmp_path / "data")}
    assert len(entries) == 1
    other = locate("somebody/data#fine", None)
    assert (other.kind, other.where, other.subset) == ("hub", "somebody/data", "fine")
    assert entry_of(source, other, tmp_path) not in entries


# The real data sets

needs_data = pytest.mark.skipif("FEDEMU_DATA" not in os.environ, reason="FEDEMU_DATA names no folder of data sets")


@pytest.fixture
def real(tmp_path_factory):
    def open_it(name, **settings):
        folder = Path(os.environ["FEDEMU_DATA"])
        if not (folder / name).is_dir():
            pytest.skip(f"FEDEMU_DATA has no {name}")
        return load_corpus(DataSource(name, **settings), cache=tmp_path_factory.getbasetemp() / "real", data=folder)

    return open_it


@needs_data
def test_omniglot_is_divided_by_writer(real):
    corpus = real("omniglot", columns=("writer",))
    assert corpus.input_shape == (1, 105, 105)
    assert (len(corpus.train), len(corpus.test), corpus.classes) == (2176, 544, 136)
    assert np.bincount(corpus.test.y).tolist() == [4] * 136
    assert len(np.unique(corpus.train.columns["writer"])) == 100
    assert np.unique(corpus.train.x).tolist() == [0, 255]
