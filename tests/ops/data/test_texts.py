"""Texts as data: small files in the forms of the real ones, and the real ones where FEDEMU_DATA names them."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.algorithms.data.corpus import NO_TARGET, Corpus
from fedemu.algorithms.data.language import BEGIN, END, MASK, PAD, SPECIAL_TOKENS, UNKNOWN
from fedemu.ops.data import corpora
from fedemu.ops.data.own.text_files import values
from fedemu.ops.data.source import DataSource, Place, TextSource
from fedemu.ops.data.texts import decode_texts
from fedemu.ops.data.tokens import train_tokenizer
from fedemu.ops.experiment import Experiment
from fedemu.protocol.errors import ConfigurationError, DataError

PLAY = """First Citizen:
Speak, speak.

All:
No more talking on't;
let it be done.

First Citizen:
Come, come.
"""
Load = Callable[..., Corpus]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDEMU_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDEMU_DATA", str(tmp_path / "data"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture
def load(folder: Path) -> Load:
    """Write a file, gzipped if its name says so, and load it.

    Tokens are characters unless the settings say otherwise.
    """

    def made(name: str, content: str, **data: Any) -> Corpus:
        text = {"kind": "next", "length": 16, "tokenizer": "characters", **data.pop("text", {})}
        raw = content.encode()
        (folder / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        return corpora.open_corpus(Experiment.parse({"data": {"dataset": name, "text": text, **data}}))

    return made


def utterances(rows: int = 40) -> str:
    lines = [f"{i // 2 or ''},{'alarm' if i % 4 else 'music'},wake me at {i}" for i in range(rows)]
    return "\n".join(["answer_id,scenario,utterance", *lines])


def read_back(corpus: Corpus, row: int) -> str:
    """The tokens that are predicted for a sample, as text."""
    targets = corpus.train.x[row, 1]
    return "".join(corpus.vocabulary[token] for token in targets if token not in (NO_TARGET, END))


def test_utterances_are_labelled_by_scenario_and_have_an_order_with_gaps(load: Load) -> None:
    corpus = load("u.csv.gz", utterances(), id_column="answer_id")
    assert (len(corpus.train), len(corpus.test), corpus.class_names) == (32, 8, ("alarm", "music"))
    assert corpus.language
    assert corpus.input_shape == (2, 16)
    assert (corpus.mean.tolist(), corpus.std.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    order = corpus.train.columns["answer_id"]
    numbers = [int(read_back(corpus, row).split()[-1]) for row in range(32)]
    assert numbers == sorted(numbers)
    assert [np.isnan(value) for value in order] == [number < 2 for number in numbers]
    assert [int(value) for value in order if value == value] == [number // 2 for number in numbers if number >= 2]


def test_any_column_may_be_the_label_or_the_text(load: Load) -> None:
    corpus = load("u.csv", "a,b\n7,xy\n10,yz\n7,zx\n10,xz", label_column="a", text={"column": "b"}, test_fraction=0.5)
    assert corpus.class_names == ("7", "10")
    assert sorted(corpus.train.y) == [0, 1]
    assert {*corpus.vocabulary} <= {*SPECIAL_TOKENS, "x", "y", "z"}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["3", "1", "2"], [3, 1, 2]),
        (["3.0", "1e3"], [3, 1000]),
        (["1", "9007199254740993"], [1, 9007199254740993]),
        (["1", "-9007199254740993"], [1, -9007199254740993]),
        (["1", "9223372036854775808"], ["1", "9223372036854775808"]),
        (["9007199254740993", "", "9007199254740992"], ["9007199254740993", "", "9007199254740992"]),
        ([9007199254740993, None, 9007199254740992], ["9007199254740993", "", "9007199254740992"]),
        (["1767225600000000000", " ", "1767225601000000000"], [1767225600e9, np.nan, 1767225601e9]),
        (["1e20", "", "3"], [1e20, np.nan, 3.0]),
        (["1501151379 1499695168", "1434542201"], [1499695168, 1434542201]),
        (["1", "", "2"], [1.0, np.nan, 2.0]),
        ([1, None, 2], [1.0, np.nan, 2.0]),
        (["0.5", "1e3"], [0.5, 1000.0]),
        (["a", "", "2"], ["a", "", "2"]),
        (["a", None], ["a", ""]),
        (["", ""], ["", ""]),
        (["1-2", "3"], ["1-2", "3"]),
    ],
)
def test_a_column_holds_numbers_where_it_can(cells: list[Any], expected: list[Any]) -> None:
    found = values(cells)
    assert found.dtype == np.array(expected).dtype
    np.testing.assert_array_equal(found, np.array(expected))


def test_rows_are_divided_by_a_column_of_splits(load: Load) -> None:
    rows = ["oos,,,what is this"] + [f"{split},d{i % 3},i{i},ask {i}" for i in range(6) for split in ("train", "test")]
    content = "\n".join(["split,domain,intent,text", *rows])
    corpus = load("c.csv", content)
    assert (len(corpus.train), len(corpus.test), corpus.class_names) == (6, 6, ("d0", "d1", "d2"))
    assert corpus.train.y.tolist() == [0, 1, 2, 0, 1, 2]
    labelled = load("c.csv", content, label_column="intent", id_column="domain")
    assert labelled.classes == 6
    assert [*labelled.test.columns["domain"]] == ["d0", "d1", "d2"] * 2
    joined = load("c.csv", content, train_split="test+train", test_fraction=0.25)
    assert len(joined.train) + len(joined.test) == 12
    assert [read_back(joined, row)[4:] for row in range(2)] == ["0", "0"]
    with pytest.raises(DataError, match=r"has no split 'dev'; its splits are oos, train, test$"):
        load("c.csv", content, train_split="dev")


def test_a_test_split_whose_labels_were_kept_secret_is_passed_over(load: Load) -> None:
    rows = [f"{split},ask {i},{label}" for split in ("train", "validation") for i, label in enumerate("ababa")]
    corpus = load("c.csv", "\n".join(["split,text,label", *rows, "test,tell 1,", "test,tell 2,"]))
    assert (corpus.train.y.tolist(), corpus.test.y.tolist()) == ([0, 1, 0, 1, 0], [0, 1, 0, 1, 0])
    assert corpus.class_names == ("a", "b")


def test_lines_are_texts_without_labels(load: Load) -> None:
    corpus = load("lines.txt.gz", "\n".join(["super song", "", *(f"play {i}" for i in range(9))]))
    assert (len(corpus.train), len(corpus.test)) == (8, 2)
    assert (corpus.classes, corpus.labelled) == (1, False)
    assert not corpus.train.y.any()


def test_a_play_is_cut_into_windows_of_one_speaker_each_in_its_order(load: Load) -> None:
    corpus = load("play.txt", "\n".join([PLAY] * 4), partition={"kind": "natural", "column": "speaker"}, test_by="id")
    assert {*corpus.train.columns["speaker"]} == {"First Citizen", "All"}
    speeches: list[tuple[str, str]] = []
    for row, speaker in enumerate(corpus.train.columns["speaker"]):
        first = corpus.train.x[row, 0, 0] == BEGIN
        before = speeches.pop()[1] if not first else ""
        speeches.append((speaker, before + read_back(corpus, row)))
    assert {*speeches} == {
        ("First Citizen", "Speak, speak."),
        ("All", "No more talking on't;\nlet it be done."),
        ("First Citizen", "Come, come."),
    }
    assert corpus.vocabulary == (
        *SPECIAL_TOKENS,
        *sorted({*"Speak, speak.No more talking on't;\nlet it be done.Come, come."}),
    )


def test_speakers_of_few_speeches_are_left_out(load: Load) -> None:
    partition = {"kind": "natural", "column": "speaker"}
    corpus = load("play.txt", "\n".join([PLAY] * 4), partition=partition, id_min_samples=5)
    assert {*corpus.train.columns["speaker"]} == {"First Citizen"}


def test_held_out_texts_do_not_shape_the_vocabulary(load: Load) -> None:
    rows = "\n".join(f"{split},{text}" for split, text in (("train", "abc"), ("train", "cab"), ("test", "abz")))
    corpus = load("s.csv", f"split,text\n{rows}")
    assert corpus.vocabulary == (*SPECIAL_TOKENS, "a", "b", "c")
    assert corpus.test.x[0, 1, :4].tolist() == [5, 6, UNKNOWN, END]


def test_a_masking_is_stored_once_and_the_same_on_every_machine(load: Load, folder: Path) -> None:
    wanted = {"text": {"kind": "masked", "tokenizer": "wordpiece", "vocabulary": 40, "length": 10}}
    corpus = load("u.csv", utterances(), **wanted)
    x = corpus.train.x
    assert x.dtype == np.int16
    asked = x[:, 1] != NO_TARGET
    assert asked.any(axis=1).all()
    assert not asked[(x[:, 0] == BEGIN) | (x[:, 0] == END) | (x[:, 0] == PAD)].any()
    assert (x[:, 0][asked] == MASK).any()
    code = (
        "import json, sys; from fedemu.ops.data import corpora; from fedemu.ops.experiment import Experiment;"
        "print(corpora.open_corpus(Experiment.parse({'data': json.loads(sys.argv[1])})).digest)"
    )
    data = json.dumps({"dataset": "u.csv", **wanted})
    elsewhere = {**os.environ, "FEDEMU_CACHE": str(folder / "other")}
    command = [sys.executable, "-c", code, data]
    run = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True, env=elsewhere)
    assert run.stdout.strip() == corpus.digest


def test_the_settings_of_texts_are_part_of_their_digest(load: Load) -> None:
    digests = {
        load("u.csv", utterances(), text=text).digest
        for text in ({}, {"kind": "masked"}, {"length": 12}, {"vocabulary": 16}, {"column": "scenario"})
    }
    assert len(digests) == 5


def test_a_small_vocabulary_of_characters_has_the_most_frequent_ones() -> None:
    vocabulary, encode = train_tokenizer(TextSource("next", 8, len(SPECIAL_TOKENS) + 3, "characters"), ["zzz ba", "bb"])
    assert vocabulary == (*SPECIAL_TOKENS, " ", "b", "z")
    assert [*encode("za b")] == [7, UNKNOWN, 5, 6]


def test_wordpiece_keeps_frequent_words_whole_and_every_character() -> None:
    texts = ["play jazz", "play rock", "Pláy jazz", "play blues"]
    vocabulary, encode = train_tokenizer(TextSource("masked", 8, 60, "wordpiece"), texts)
    assert vocabulary[:5] == SPECIAL_TOKENS
    assert len(set(vocabulary)) == len(vocabulary) <= 60
    assert [vocabulary[token] for token in encode("PLAY jazz")] == ["play", "jazz"]
    assert "".join(vocabulary[token].removeprefix("##") for token in encode("yalp")) == "yalp"
    assert [*encode("x")] == [UNKNOWN]


def test_a_vocabulary_of_wordpiece_without_room_for_all_characters_has_the_most_frequent_ones() -> None:
    texts = ["ab ab ab ba", "ABx c!"]
    vocabulary, encode = train_tokenizer(TextSource("next", 8, len(SPECIAL_TOKENS) + 5, "wordpiece"), texts)
    assert vocabulary == (*SPECIAL_TOKENS, "##a", "##b", "!", "a", "b")
    assert [vocabulary[token] for token in encode("abx Ba! c")] == ["[UNK]", "b", "##a", "!", "[UNK]"]
    more, _ = train_tokenizer(TextSource("next", 8, len(SPECIAL_TOKENS) + 6, "wordpiece"), texts)
    assert more == (*vocabulary, "ab"), "what is left is for words"
    many = [chr(0x4E00 + i) * 2 + chr(ord("a") + i % 26) for i in range(2500)]
    assert len(train_tokenizer(TextSource("next", 8, 2000, "wordpiece"), many).vocabulary) <= 2000
    with pytest.raises(DataError) as caught:
        train_tokenizer(TextSource("next", 8, len(SPECIAL_TOKENS) + 3, "wordpiece"), ["ab", "cd"])
    assert str(caught.value) == (
        "data.text.vocabulary = 8 has room for 1 character, and no word of the texts is made of these alone; raise it, "
        "or set data.text.tokenizer = 'characters'"
    )


def test_a_folder_is_read_by_hugging_face(folder: Path) -> None:
    (folder / "talk").mkdir()
    for split, size in (("train", 6), ("test", 3)):
        rows = [{"sentence": f"say {i}", "label": f"l{i % 2}", "time": None if i == 0 else i} for i in range(size)]
        (folder / "talk" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"dataset": "talk", "id_column": "time", "text": {"kind": "next", "tokenizer": "characters", "length": 8}}
    corpus = corpora.open_corpus(Experiment.parse({"data": data}))
    assert (len(corpus.train), len(corpus.test), corpus.class_names) == (6, 3, ("l0", "l1"))
    np.testing.assert_array_equal(corpus.train.columns["time"], [np.nan, 1, 2, 3, 4, 5])
    assert [read_back(corpus, row) for row in range(2)] == ["say 0", "say 1"]


@pytest.mark.parametrize(
    ("name", "content", "data", "sentence"),
    [
        ("a.csv", "words\nhello", {}, "set data.text.column to that of the texts"),
        ("a.csv", "text\nhello", {"text": {"column": "word"}}, "has no column 'word'; its columns are text"),
        ("a.csv", "text\nhello", {"label_column": "mood"}, "has no column 'mood'; its columns are text"),
        ("a.csv", "text\nhello", {"id_column": "who"}, "has no column 'who'; its columns are text"),
        ("a.csv", "text,label\nhello,1.5\nyou,2", {}, "fractions, not classes; name another by data.label_column"),
        ("a.csv", "text,label\nhello,\nyou,b", {}, "the column 'label' of 'a.csv' is empty in row 1"),
        ("a.csv", "text,label\nhello", {}, "has 1 cells where the heading has 2"),
        ("a.csv", "text,text\nhello,you", {}, "names the column 'text' twice"),
        ("a.csv", "text\n", {}, "holds no row below its heading"),
        ("a.csv", "", {}, "is no table of comma-separated values: it is empty"),
        ("a.txt", "\n\n", {}, "holds no texts"),
        ("a.txt", "a\na\na\na", {}, "fewer than two different tokens"),
    ],
)
def test_texts_that_cannot_be_read_are_refused_in_one_sentence(
    name: str, content: str, data: dict[str, Any], sentence: str, load: Load
) -> None:
    with pytest.raises(DataError) as caught:
        load(name, content, **data)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_texts_and_other_data_are_not_mixed_up(folder: Path) -> None:
    (folder / "a.txt").write_text("hello\nyou")
    (folder / "a.xml").write_text("<a/>")
    (folder / "b.txt.gz").write_text("not gzipped")
    for data, sentence in (
        ({"dataset": "a.txt"}, "is a file of texts; set data.text.kind"),
        ({"dataset": "digits", "text": {"kind": "masked"}}, "holds no texts; set data.text.kind = 'none'"),
        ({"dataset": "a.xml"}, "or to code of your own that reads the file"),
        ({"dataset": "b.txt.gz", "text": {"kind": "next"}}, "can't be read as UTF-8 text"),
    ):
        with pytest.raises(DataError) as caught:
            corpora.open_corpus(Experiment.parse({"data": data}))
        assert sentence in str(caught.value)


def test_without_the_library_wordpiece_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    wanted = TextSource("masked", 8, 60, "wordpiece")
    with pytest.raises(ConfigurationError, match=r"install it with pip install 'fedemu\[language\]'"):
        train_tokenizer(wanted, ["hello"])
    nowhere = Place("file", "nowhere.txt")
    with pytest.raises(ConfigurationError, match="needs the package tokenizers"):  # before any text is read
        decode_texts(DataSource("nowhere.txt", text=wanted), wanted, nowhere, Path("nowhere"))


REAL = [
    ("nlu_eval_home.csv.gz", {}, (8869, 2219, 18)),
    ("slurp_devel_test.csv.gz", {"train_split": "devel+test"}, (4035, 1016, 18)),
    ("tinyshakespeare.txt.gz", {"id_column": "speaker", "id_min_samples": 10, "test_by": "id"}, (14886, 3572, 1)),
]


@pytest.mark.skipif("FEDEMU_DATA" not in os.environ, reason="FEDEMU_DATA names no folder of data sets")
@pytest.mark.parametrize(("name", "data", "sizes"), REAL, ids=[name for name, _, _ in REAL])
def test_the_real_files_are_read(name: str, data: dict[str, Any], sizes: tuple[int, ...], tmp_path: Path) -> None:
    file = Path(os.environ["FEDEMU_DATA"]) / "text" / name
    if not file.is_file():
        pytest.skip(f"FEDEMU_DATA has no text/{name}")
    play = name.startswith("tiny")
    text = {"kind": "next", "length": 64, "tokenizer": "characters"} if play else {"kind": "masked", "length": 24}
    stream = {"kind": "periods", "order": "recorded_at_unix"} if name.startswith("slurp") else {"kind": "static"}
    wanted = Experiment.parse({"data": {"dataset": str(file), "text": text, **data}, "stream": stream})
    corpus = corpora.load_corpus(corpora.source_of(wanted.data, wanted.stream), cache=tmp_path)
    assert (len(corpus.train), len(corpus.test), corpus.classes) == sizes
    if name.startswith("slurp"):
        times = corpus.train.columns["recorded_at_unix"]
        assert times.dtype == np.int64
        assert 1.43e9 < times.min() <= times.max() < 1.51e9
