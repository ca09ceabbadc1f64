"""Files of texts and tables: where their lines end, and how their columns are called."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedemu.ops.data.own.text_files import identifiers, read_file, values
from fedemu.protocol.errors import DataError

INSIDE = "one\u2028two\x85three\ffour\x1cfive\vsix"
"""A line with all characters that ``str.splitlines`` cuts at, and that end no line of a file."""


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_newlines_end_a_row_or_a_text(end: str, tmp_path: Path) -> None:
    table, plain, play = tmp_path / "t.csv", tmp_path / "p.txt", tmp_path / "play.txt"
    play.write_bytes(end.join(["First:", "Speak,", "speak.", "", "Second:", INSIDE]).encode())
    table.write_bytes(end.join(["label;text", f"a;{INSIDE}", 'b;"ok, then"', ""]).encode())
    plain.write_bytes(end.join([INSIDE, "", "last"]).encode())
    assert read_file(table) == {"label": ["a", "b"], "text": [INSIDE, "ok, then"]}
    assert read_file(plain) == {"text": [INSIDE, "last"]}
    assert read_file(play) == {"speaker": ["First", "Second"], "text": ["Speak,\nspeak.", INSIDE]}


@pytest.mark.parametrize(("name", "table"), [("a.csv.txt", False), ("a.csv.TXT.gz", False), ("a.txt.CSV.gz", True)])
def test_the_end_of_a_files_name_tells_whether_it_is_a_table(name: str, table: bool, tmp_path: Path) -> None:
    content = b"text,label\none,two"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    read = read_file(tmp_path / name)
    assert read == ({"text": ["one"], "label": ["two"]} if table else {"text": ["text,label", "one,two"]})


def test_a_quoted_cell_keeps_its_newlines(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_bytes(b'label,text\r\na,"one\r\ntwo\n"\r\n')
    assert read_file(table) == {"label": ["a"], "text": ["one\r\ntwo\n"]}


def test_a_cell_may_hold_a_whole_book(tmp_path: Path) -> None:
    book = "word " * 50_000
    (tmp_path / "books.csv").write_text(f"text,label\n{book},1\n")
    assert read_file(tmp_path / "books.csv") == {"text": [book], "label": ["1"]}


def test_names_in_a_heading_have_no_spaces_around_them_and_cells_keep_theirs(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("a, label , two words\n1, x ,2\n")
    assert read_file(table) == {"a": ["1"], "label": [" x "], "two words": ["2"]}
    table.write_text("a,a \n1,2\n")
    with pytest.raises(DataError, match="names the column 'a' twice in its heading; give"):
        read_file(table)


def test_a_number_may_begin_with_its_point() -> None:
    found = values([".5", "-.25", "+.5e1", "", "1."]).tolist()
    assert found == pytest.approx([0.5, -0.25, 5.0, math.nan, 1.0], nan_ok=True)
    assert values([".", "1"]).tolist() == [".", "1"]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        (["7", "-1", " 8 "], [7, -1, 8]),
        (["+1", "-1"], [1, -1]),
        (["2.0", "1.0"], [2, 1]),
        (["1.5", "0.25"], [1.5, 0.25]),
        (["3", "", "1"], [3.0, math.nan, 1.0]),
        ([3, None, 1], [3.0, math.nan, 1.0]),
        ([0.5, 1e20], [0.5, 1e20]),
        ([True, False], [1, 0]),
        (["9007199254740993", "9007199254740992"], [9007199254740993, 9007199254740992]),
        (["7", "07", "007", "8 "], ["7", "07", "007", "8"]),
        (["00501", "", "00502"], ["00501", "", "00502"]),
        (["1e3", "1000"], ["1e3", "1000"]),
        (["12e5"], ["12e5"]),
        (["1", "1.0"], ["1", "1.0"]),
        (["0.5", "0.50"], ["0.5", "0.50"]),
        (["0", "-0"], ["0", "-0"]),
        ([".5", "1"], [".5", "1"]),
        (["18 24", "18 30"], ["18 24", "18 30"]),
        (["9" * 400, "8" * 400], ["9" * 400, "8" * 400]),
    ],
)
def test_cells_that_name_something_are_numbers_only_if_they_are_written_as_such(
    cells: list[Any], expected: list[Any]
) -> None:
    found = identifiers(cells)
    assert found.dtype == np.array(expected).dtype
    np.testing.assert_array_equal(found, np.array(expected))


def test_a_damaged_gzip_file_is_told(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress("".join(f"{n},{n * n % 7919}\n" for n in range(3000)).encode()))
    packed[1000:1100] = bytes(byte ^ 0xFF for byte in packed[1000:1100])
    for content in (packed, packed[:500], b"no gzip"):
        table = tmp_path / "t.csv.gz"
        table.write_bytes(content)
        with pytest.raises(DataError, match=r"t\.csv\.gz can't be read"):
            read_file(table)
