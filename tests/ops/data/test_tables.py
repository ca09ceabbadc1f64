"""Files of tables: columns of numbers with labels, and texts with labels."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from fedemu.algorithms.data.corpus import Corpus
from fedemu.ops.data import corpora
from fedemu.ops.data.source import Place, locate
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import DataError

Load = Callable[..., Corpus]
TEXTS = {"kind": "labels", "length": 6, "tokenizer": "characters"}


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Write a file and load it."""
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDEMU_DATA", str(tmp_path))

    def made(content: str, name: str = "t.csv", **data: Any) -> Corpus:
        (tmp_path / name).write_text(content)
        return corpora.open_corpus(Experiment.parse({"data": {"dataset": name, **data}}))

    return made


def test_columns_of_numbers_are_the_sample_and_words_the_classes(load: Load) -> None:
    rows = "1,rose,0.5,train\n2,tulip,1e1,train\n3,rose,-7,test\n4,daisy,0,train\n"
    corpus = load(f"a,kind,b,split\n{rows}", label_column="kind")
    assert corpus.class_names == ("daisy", "rose", "tulip")
    assert corpus.train.x.tolist() == [[1, 0.5], [2, 10], [4, 0]]
    assert (corpus.train.x.dtype, corpus.train.y.tolist()) == (np.float32, [1, 2, 0])
    assert (corpus.test.x.tolist(), corpus.test.y.tolist()) == ([[3, -7]], [1])


def test_truths_are_numbers_and_columns_without_any_number_are_left_out(load: Load) -> None:
    corpus = load("a,day,on,none,label\n" + "3,2026-11-28,True,,0\n 2 ,2026-11-29,false,,1\n1,x,TRUE,,0\n")
    assert sorted(corpus.train.x.tolist() + corpus.test.x.tolist()) == [[1, 1], [2, 0], [3, 1]]
    assert corpus.left_out == ("day", "none")


def test_names_of_splits_may_have_capital_letters_and_spaces_around_them(load: Load) -> None:
    corpus = load("a,y,split\n1,0, Train\n2,1, Train\n3,1, TEST\n4,0, other\n")
    assert (corpus.train.x.tolist(), corpus.test.x.tolist()) == ([[1], [2]], [[3]])


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_rows_whose_splits_differ_only_by_capital_letters_and_spaces_are_of_one_split(
    load: Load, name: str, tmp_path: Path
) -> None:
    splits = ["train", "Train", " TRAIN", "test", "Test", "spare", "Spare"]
    frame = pandas.DataFrame({"a": range(7), "y": [0, 1, 0, 1, 0, 0, 1], "text": "ab", "split": splits})

    def loaded(**more: Any) -> Corpus:
        data = {"dataset": name, "label_column": "y", "image_column": "a"}
        if name == "t.csv":
            return load(frame.to_csv(index=False), **data | more)
        frame.to_parquet(tmp_path / name)
        return corpora.open_corpus(Experiment.parse({"data": data | more}))

    corpus = loaded()
    assert (corpus.train.x.tolist(), corpus.test.x.tolist()) == ([[0], [1], [2]], [[3], [4]])
    named = loaded(train_split="SPARE+train")
    assert (sorted(named.train.x.tolist()), named.test.x.tolist()) == ([[0], [1], [2], [5], [6]], [[3], [4]])
    texts = loaded(text=TEXTS)
    assert (texts.train.y.tolist(), texts.test.y.tolist()) == ([0, 1, 0], [1, 0])
    frame.loc[[1, 4], "split"] = None
    for more in ({}, {"text": TEXTS}):
        with pytest.raises(DataError) as caught:
            loaded(**more)
        assert str(caught.value) == (
            f"the data set {name!r} has rows that name no split; name it in the column of the splits, or set "
            "data.train_split to leave these rows out"
        )
    assert loaded(train_split="train").train.x.tolist() == [[0], [2]]


@pytest.mark.parametrize(
    ("wanted", "split", "said"),
    [
        ({"id_min_samples": 2}, "train", "data.id_min_samples counts, is empty for 3 training samples"),
        ({"id_min_samples": 2}, "test", "data.id_min_samples counts, is empty for 1 test sample"),
        ({"test_by": "id"}, "train", "data.test_by divides, is empty for 3 training samples"),
    ],
)
def test_samples_of_nobody_are_not_those_of_one_person(
    load: Load, wanted: dict[str, Any], split: str, said: str
) -> None:
    rows = ["1,a,0", "2,,1", "3,a,0", "4, ,1", "5,b,0", "6,b,1", "7,,0"]
    if split == "test":
        rows = [f"{row},{'test' if row == '2,,1' else 'train'}" for row in rows if row not in ("4, ,1", "7,,0")]
    heading = "a,person,y" + (",split" if split == "test" else "")
    with pytest.raises(DataError) as caught:
        load("\n".join([heading, *rows]), id_column="person", **wanted)
    assert str(caught.value) == (
        f"the column 'person' of 't.csv', by which {said}; fill it in, or leave out the samples without a value"
    )
    assert len(load("\n".join([heading, *rows]), id_column="person").train) >= 4, "nothing goes by the ids"


def test_a_file_may_have_its_ending_in_capital_letters(load: Load, tmp_path: Path) -> None:
    rows = "a,label\n" + "".join(f"{i},{i % 2}\n" for i in range(10))
    small = load(rows)
    assert load(rows, "T.CSV").digest == small.digest
    (tmp_path / "Z.CSV.GZ").write_bytes(gzip.compress(rows.encode()))
    assert corpora.open_corpus(Experiment.parse({"data": {"dataset": "Z.CSV.GZ"}})).digest == small.digest
    with pytest.raises(DataError, match=r"there is no file .*/NONE\.CSV or NONE\.CSV"):
        locate("NONE.CSV", tmp_path)


@pytest.mark.parametrize("first", [2**60, 10**30])
def test_labels_that_differ_in_the_last_digit_of_a_long_number_are_different_classes(load: Load, first: int) -> None:
    corpus = load("a,label\n" + "".join(f"{i},{first + i % 3}\n" for i in range(12)))
    assert corpus.class_names == (str(first), str(first + 1), str(first + 2))


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["00502", "00501"], ("00501", "00502")),
        (["01", "1", "001"], ("001", "01", "1")),
        (["1e3", "1000"], ("1000", "1e3")),
        (["1e20", "1e400"], ("1e20", "1e400")),
        (["10", "9"], ("9", "10")),
        (["2.0", "-1.0"], ("-1", "2")),
    ],
)
@pytest.mark.parametrize("text", [None, TEXTS])
def test_labels_that_are_codes_keep_their_digits_and_numbers_are_numbers(
    labels: list[str], classes: tuple[str, ...], text: dict[str, Any] | None, load: Load
) -> None:
    rows = "".join(f"{i},{label},ab,train\n{i},{label},ab,test\n" for i, label in enumerate(labels))
    corpus = load(f"a,label,text,split\n{rows}", **({} if text is None else {"text": text}))
    assert corpus.class_names == classes
    assert corpus.train.y.tolist() == corpus.test.y.tolist()
    assert len({*corpus.train.y.tolist()}) == len(labels)


def test_ids_that_are_codes_are_different_people_and_an_order_still_goes_by_numbers(load: Load) -> None:
    rows = "".join(f"{i},{i % 2},{['7', '07', '007', '8'][i % 4]},0{i}e1\n" for i in range(40))
    table = f"a,label,who,when\n{rows}"
    ids = {"7", "07", "007", "8"}
    for data in ({"partition": {"kind": "natural", "column": "who"}}, {"id_column": "who", "test_by": "id"}):
        corpus = load(table, image_column="a", **data)
        assert {*corpus.train.columns["who"]} == {*corpus.test.columns["who"]} == ids
    of_stream = Experiment.parse(
        {
            "data": {"dataset": "t.csv", "image_column": "a", "id_column": "who"},
            "stream": {"kind": "periods", "order": "when"},
        }
    )
    columns = corpora.open_corpus(of_stream).train.columns
    assert {*columns["who"]} == ids
    assert columns["when"].dtype == np.int64
    assert {*columns["when"]} <= {*range(0, 400, 10)}


def test_labels_of_several_numbers_are_words(load: Load) -> None:
    assert load("a,label\n" + "1,18 24\n2,18 30 \n" * 5 + "3, 18 30\n").class_names == ("18 24", "18 30")


def test_spaces_around_words_make_no_classes_and_no_ids_of_their_own(load: Load) -> None:
    corpus = load("a, label, who\n" + "1, ill, p1\n2,ill,p1 \n3,well,p2\n4, well ,p2\n" * 2, id_column="who")
    assert corpus.class_names == ("ill", "well")
    assert {*corpus.train.columns["who"], *corpus.test.columns["who"]} == {"p1", "p2"}


def test_without_a_column_of_splits_a_part_of_each_class_is_set_apart(load: Load) -> None:
    corpus = load("a;y;who\n" + "".join(f"{i};{i % 2};p{i}\n" for i in range(10)), id_column="who")
    assert (len(corpus.train), len(corpus.test), corpus.input_shape) == (8, 2, (1,))
    assert sorted(corpus.test.y) == [0, 1]
    assert {f"p{int(x)}" for x in corpus.test.x[:, 0]} == {*corpus.test.columns["who"]}


@pytest.mark.parametrize(
    ("content", "data", "said"),
    [
        ("a,y\n1,0\nx,1\n", {}, "has 'x' in the column 'a', where a finite number (float32) should be; mend it"),
        ("a,y\ntrue,0\n2,1\n", {}, "row 1 of 't.csv' has 'true' in the column 'a'"),
        ("a,y\n1,0\n,1\n\nx,1\n3,2\n", {}, "(float32) should be (and so in 1 more row); mend it"),
        ("a,y\n1,0\n1e39,1\n", {}, "row 2 of 't.csv' has '1e39' in the column 'a', where a finite number"),
        ("a,y\n1,0\n2, \n", {}, "the column 'y' of 't.csv' is empty in row 2"),
        ("a,y\n1,0\n,1\n", {}, "row 2 of 't.csv' has an empty cell in the column 'a'"),
        ("a,b\n1,0\n", {}, "'t.csv' has no column called label, labels, target, class, y; its columns are a, b; set"),
        ("a,b\n1,0\n", {"label_column": "c"}, "'t.csv' has no column 'c'; its columns are a, b"),
        ("a,y\n1,0\n", {"id_column": "c"}, "'t.csv' has no column 'c'; its columns are a, y"),
        ("y\n1\n", {}, "has no column of numbers to learn from beside its labels; its columns are y; set data.text"),
        ("a,y\nu,1\nv,1\n", {}, "its columns are a, y; set data.text.kind = 'labels' to learn from texts"),
        ("a;y\n0,5;1\n2,5;0\n", {}, "are a, y; write numbers with a decimal point, not as '0,5' in the column 'a'"),
        ("a,y\nu,1\nv,1\n", {"image_column": "a"}, "row 1 of 't.csv' has 'u' in the column 'a'"),
        ("a,y\n1,0\n2\n", {}, "row 2 of "),
        ("a,y\n1,0.5\n2,1\n", {}, "the label column 'y' of 't.csv' holds fractions"),
        ("a,y\n1,1e-3\n2,007\n", {}, "the label column 'y' of 't.csv' holds fractions"),
        ("a,y,split\n1,0,train\n2,1,holdout\n", {}, "splits train, holdout, and none to test on is called test, vali"),
    ],
)
def test_a_table_that_does_not_fit_is_told_with_its_row_and_columns(
    content: str, data: dict[str, Any], said: str, load: Load
) -> None:
    with pytest.raises(DataError) as caught:
        load(content, **data)
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_no_data_set_of_the_hub(tmp_path: Path) -> None:
    said = r"there is no file .*/none\.csv or none\.csv; check data\.dataset, or set FEDEMU_DATA to the folder"
    with pytest.raises(DataError, match=said):
        locate("none.csv", tmp_path)


def test_texts_with_labels_are_tokens_that_stay_whole(load: Load) -> None:
    rows = "good,ab,train\nbad,ba,train\nbad,bbbbbbbbbb,train\ngood,az,test\n"
    corpus = load(f"label,text,split\n{rows}", text=TEXTS)
    assert (corpus.class_names, corpus.input_shape, corpus.outputs) == (("bad", "good"), (6,), 2)
    assert (corpus.language, corpus.tokens) == (False, True)
    assert corpus.train.x.tolist() == [[5, 6, 0, 0, 0, 0], [6, 5, 0, 0, 0, 0], [6] * 6]
    assert (corpus.test.x.tolist(), corpus.test.y.tolist()) == ([[5, 1, 0, 0, 0, 0]], [1])
    x, y = corpus.batch(corpus.train, np.array([1, 0]))
    assert (x.dtype, y.dtype) == (torch.int64, torch.int64)
    assert x.tolist() == [[6, 5, 0, 0, 0, 0], [5, 6, 0, 0, 0, 0]]


def test_texts_without_labels_cannot_be_classified(load: Load) -> None:
    with pytest.raises(DataError, match=r"has no column of labels among a, text; set data\.label_column"):
        load("a,text\n1,ab\n2,ba\n", text=TEXTS)


def test_lines_of_json_and_parquet_are_tables(load: Load, tmp_path: Path) -> None:
    rows = [{"a": i / 2, "tokens": [i, i + 1], "label": "no" if i % 2 else "yes"} for i in range(10)]
    lines = "\n".join(map(json.dumps, rows))
    corpus = load(lines, "t.jsonl", image_column="a")
    assert (corpus.class_names, corpus.input_shape, corpus.train.x.dtype) == (("no", "yes"), (1,), np.float32)
    assert corpus.left_out == ()
    tokens = load(lines, "t.jsonl", image_column="tokens")
    assert (tokens.tokens, tokens.input_shape) == (True, (2,))
    assert all(b == a + 1 for a, b in tokens.train.x.tolist())
    import datasets

    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "t.parquet")
    (tmp_path / "T.PARQUET").write_bytes((tmp_path / "t.parquet").read_bytes())
    for name in ("t.parquet", "T.PARQUET"):
        stored = corpora.open_corpus(Experiment.parse({"data": {"dataset": name, "image_column": "tokens"}}))
        assert stored.train.x.tolist() == tokens.train.x.tolist()
    assert load(lines, "T.JSONL", image_column="a").digest == corpus.digest


def test_lines_of_json_may_name_the_split_of_each_row_as_a_table_does(load: Load) -> None:
    splits = ["train", "dev", "test", "spare"]
    rows = [{"a": i, "split": split, "label": i % 2, "text": "ab"} for i, split in enumerate(splits)]
    corpus = load("\n".join(map(json.dumps, rows)), "t.jsonl", train_split="train+dev")
    assert (corpus.train.x.tolist(), corpus.test.x.tolist()) == ([[0], [1]], [[2]])
    texts = load("\n".join(map(json.dumps, rows)), "t.jsonl", train_split="train+dev", text=TEXTS)
    assert (texts.train.y.tolist(), texts.test.y.tolist()) == ([0, 1], [0])


def test_a_frame_may_name_the_split_of_each_row_and_what_holds_no_numbers_is_told(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {"a": [1, 2, 3], "on": [True, False, True], "city": ["A", "B", "A"], "split": ["train", "train", "test"]}
    label = pandas.Categorical(["mid", "low", "low"], ["mid", "low", "high"], ordered=True)
    frame = pandas.DataFrame({**rows, "label": label, "text": "ab", "day": pandas.Timestamp("2026-11-28")})
    frame.to_pickle(tmp_path / "frame")
    (tmp_path / "framed.py").write_text("import pandas\nframe = pandas.read_pickle(__file__.removesuffix('d.py'))\n")
    monkeypatch.chdir(tmp_path)
    frame.to_parquet("t.parquet")
    for dataset in ("framed.py:frame", "t.parquet"):
        corpus = corpora.open_corpus(Experiment.parse({"data": {"dataset": dataset}}))
        assert (corpus.train.x.tolist(), corpus.test.x.tolist()) == ([[1, 1], [2, 0]], [[3, 1]])
        assert corpus.left_out == ("city", "text", "day")
        assert (corpus.class_names, corpus.train.y.tolist()) == (("low", "mid"), [1, 0]), "not the order of categories"
        texts = corpora.open_corpus(Experiment.parse({"data": {"dataset": dataset, "text": {"kind": "labels"}}}))
        assert (texts.train.y.tolist(), texts.test.y.tolist(), texts.left_out) == ([1, 0], [0], ())
    assert (
        load(
            "\n".join(map(json.dumps, [{"a": [i, i], "label": i % 2, "b": "x"} for i in range(9)])), "t.jsonl"
        ).left_out
        == ()
    )


def test_secret_labels_and_rows_of_other_splits_add_no_class_to_a_table(load: Load) -> None:
    rows = "1,0,train\n2,1,train\n3,1,validation\n4,7,spare\n5, -1,test\n"
    corpus = load(f"a,label,split\n{rows}")
    assert (corpus.class_names, corpus.test.x.tolist(), corpus.test.y.tolist()) == (("0", "1"), [[3]], [1])
    assert load(f"a,label,split\n{rows}6,-1,train\n").test.x.tolist() == [[5]]


def test_numbers_of_rows_that_pandas_has_written_are_no_part_of_a_sample(load: Load, tmp_path: Path) -> None:
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "label": [0, 1, 0, 1]}, index=[5, 6, 7, 8])
    frame.to_parquet(tmp_path / "t.parquet")
    for corpus in (load(frame.to_csv()), corpora.open_corpus(Experiment.parse({"data": {"dataset": "t.parquet"}}))):
        assert corpus.train.x.tolist() == [[1], [2], [4]]


def test_a_path_may_have_the_sign_that_parts_a_configuration_from_its_data_set(tmp_path: Path) -> None:
    (tmp_path / "c#").mkdir()
    (tmp_path / "c#" / "numbers.csv").touch()
    assert locate("c#/numbers.csv", tmp_path) == Place("file", str(tmp_path / "c#" / "numbers.csv"))
    (tmp_path / "c").mkdir()
    assert locate("c#small", tmp_path) == Place("folder", str(tmp_path / "c"), "small")
