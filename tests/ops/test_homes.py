"""Paths that begin with a home folder, also where there is none."""

from __future__ import annotations

import pwd
from collections.abc import Callable
from pathlib import Path

import pytest

from fedemu.ops.homes import cache_folder, expanded, keys_folder, state_folder
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


@pytest.mark.parametrize(
    ("folder", "name", "variable", "inside", "below"),
    [
        (cache_folder, "FEDEMU_CACHE", "XDG_CACHE_HOME", "fedemu", ".cache"),
        (state_folder, "FEDEMU_STATE", "XDG_STATE_HOME", "fedemu", ".local/state"),
        (keys_folder, "FEDEMU_KEYS", "XDG_CONFIG_HOME", "fedemu/keys", ".config"),
    ],
)
def test_cache_state_and_keys_are_where_the_environment_says_or_where_the_user_keeps_such_things(
    folder: Callable[[dict[str, str]], Path], name: str, variable: str, inside: str, below: str
) -> None:
    assert folder({name: "/a", variable: "/b"}) == Path("/a")
    assert folder({name: "", variable: "/b"}) == Path("/b", inside)
    assert folder({variable: ""}) == Path.home() / below / inside


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigurationError, match=r"^this user has no home folder; set FEDEMU_CACHE, or HOME$"):
        cache_folder({})
