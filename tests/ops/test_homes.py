"""Paths that begin with a home folder, also where there is none."""

from __future__ import annotations

import pwd
from pathlib import Path

import pytest

from fedemu.ops.homes import expanded, user_folder
from fedemu.protocol.errors import ConfigurationError


def test_a_path_in_a_home_folder_is_written_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expanded("~/data") == tmp_path / "data"
    assert expanded("data/~") == Path("data/~")
    assert expanded("./~/data") == Path("~/data"), "a folder of this name in the working folder"


def test_the_home_folder_of_a_user_who_is_not_there_is_told_in_words() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^~nobody-of-this-name/data begins with ~, .*; write the whole path$"
    ):
        expanded("~nobody-of-this-name/data")


def test_a_folder_of_the_user_is_the_one_that_the_environment_names_or_in_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder({"XDG_CACHE_HOME": "/c"}, "XDG_CACHE_HOME", ".cache", "FEDEMU_CACHE") == Path("/c")
    assert user_folder({"XDG_CACHE_HOME": ""}, "XDG_CACHE_HOME", ".cache", "FEDEMU_CACHE") == tmp_path / ".cache"


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigurationError, match=r"^this user has no home folder; set FEDEMU_CACHE, or HOME$"):
        user_folder({}, "XDG_CACHE_HOME", ".cache", "FEDEMU_CACHE")
