"""What lies at a path, and that a refusal to look is no answer."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemu.protocol.host.paths import exists, is_file, is_folder

LOOKS = (exists, is_file, is_folder)


def looks(path: Path) -> list[bool]:
    return [look(path) for look in LOOKS]


def test_a_file_a_folder_and_links_to_them_are_told_apart(tmp_path: Path) -> None:
    file, folder, pipe = tmp_path / "file", tmp_path / "folder", tmp_path / "pipe"
    file.touch()
    folder.mkdir()
    os.mkfifo(pipe)
    for name, target in (("to-file", file), ("to-folder", folder), ("astray", tmp_path / "none"), ("round", "round")):
        (tmp_path / name).symlink_to(target)
    assert looks(file) == looks(tmp_path / "to-file") == [True, True, False]
    assert looks(folder) == looks(tmp_path / "to-folder") == [True, False, True]
    assert looks(pipe) == [True, False, False]


def test_where_a_path_leads_nowhere_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "astray").symlink_to(tmp_path / "none")
    (tmp_path / "round").symlink_to("round")
    for name in ("none", "none/below", "file/below", "astray", "round", "zero\0byte"):
        assert looks(tmp_path / name) == [False, False, False], name


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOMEM, errno.ESTALE])
def test_that_the_system_refuses_to_look_is_an_error(
    look: Callable[[Path], bool], number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> os.stat_result:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        look(tmp_path)


@pytest.mark.parametrize("look", LOOKS)
def test_a_name_that_no_file_system_takes_is_an_error(look: Callable[[Path], bool], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        look(tmp_path / ("n" * 300))
