"""The names of the classes that a run directory tells, whatever its file holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedemu.coordinator.record.data_file import DATA, read_class_names


def test_classes_have_the_names_that_the_file_tells(tmp_path: Path) -> None:
    (tmp_path / DATA).write_text('{"class_names": ["rose", 7]}')
    assert read_class_names(tmp_path) == ("rose", "7")


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"class_names": 3}', "[" * 100_000])
@pytest.mark.usefixtures("uncollected")
def test_a_file_that_cannot_be_read_names_no_class(tmp_path: Path, content: str) -> None:
    assert read_class_names(tmp_path) == ()
    (tmp_path / DATA).write_text(content)
    assert read_class_names(tmp_path) == ()
