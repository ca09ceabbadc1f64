"""The folder of keys: files and their modes, names, and wrong input in one sentence."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from zmq.auth import create_certificates, load_certificate

from fedemu.ops.keys import store
from fedemu.ops.keys.store import KeyFolder, read_public
from fedemu.protocol.errors import ConfigurationError

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
"""The public key of the example in the specification of CURVE."""


@pytest.fixture
def folder(tmp_path: Path) -> KeyFolder:
    return KeyFolder(tmp_path / "keys")


def test_the_folder_is_named_or_in_the_environment_or_the_users_configuration() -> None:
    environment = {"FEDEMU_KEYS": "/var/keys", "XDG_CONFIG_HOME": "/x"}
    assert KeyFolder.of("/here", environment).path == Path("/here")
    assert KeyFolder.of("", environment).path == Path("/var/keys")
    assert KeyFolder.of("", {"XDG_CONFIG_HOME": "/x"}).path == Path("/x/fedemu/keys")
    assert KeyFolder.of("", {}).path == Path.home() / ".config" / "fedemu" / "keys"


@pytest.mark.parametrize("mask", [0, 0o077])
def test_only_the_user_reads_the_secret_key(folder: KeyFolder, mask: int) -> None:
    before = os.umask(mask)
    try:
        public = folder.new()
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in folder.path.iterdir()} == {
        "machine.key": 0o644,
        "machine.key_secret": 0o600,
    }
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert load_certificate(folder.public_file) == (public.encode(), None)
    assert folder.pair()[0] == public
    assert folder.pair()[1] not in folder.public_file.read_text()
    assert public[0].isalnum()


def test_a_second_pair_does_not_take_the_place_of_the_first(folder: KeyFolder) -> None:
    public = folder.new()
    for lost in (None, folder.public_file):
        if lost is not None:
            lost.unlink()
        with pytest.raises(ConfigurationError, match=r"there is a key in .*keys already"):
            folder.new()
        assert folder.pair()[0] == public
    folder.secret_file.rename(folder.public_file)
    with pytest.raises(ConfigurationError, match=r"there is a key in .*keys already"):
        folder.new()


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "none"])
def test_of_two_commands_that_make_a_pair_at_once_one_succeeds(
    folder: KeyFolder, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(store.os, "link", refuse)
    first = []

    def later(*words: Any) -> Any:
        """What the second command does when it has found no key: meanwhile the first one makes its pair."""
        monkeypatch.setattr(store, "create_certificates", create_certificates)
        first.append(folder.new())
        return create_certificates(*words)

    monkeypatch.setattr(store, "create_certificates", later)
    with pytest.raises(ConfigurationError, match=r"there is a key in .*keys already"):
        folder.new()
    assert (folder.pair()[0], read_public(str(folder.public_file))) == (first[0], first[0])
    assert sorted(file.name for file in folder.path.iterdir()) == ["machine.key", "machine.key_secret"]
    assert folder.secret_file.stat().st_mode & 0o777 == 0o600
    assert folder.secret_file.stat().st_nlink == 1


def test_a_file_system_without_modes_gets_no_keys(
    folder: KeyFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = Path.stat

    def without_modes(path: Path, **more: Any) -> os.stat_result:
        found = stat(path, **more)
        return os.stat_result((found.st_mode | 0o777, *found[1:]))

    monkeypatch.setattr(Path, "stat", without_modes)
    for place in (folder.path, folder.path / "deep" / "er"):
        with pytest.raises(ConfigurationError) as caught:
            KeyFolder(place).new()
        assert str(caught.value) == (
            f"the file system of {place} keeps no modes of files, so other users could read the secret key there; "
            "name another folder with --keys"
        )
        assert [*tmp_path.iterdir()] == []
    folder.path.mkdir()
    with pytest.raises(ConfigurationError):
        folder.new()
    assert [*folder.path.iterdir()] == []


def test_a_secret_key_that_others_can_read_is_not_used(folder: KeyFolder) -> None:
    folder.new()
    folder.secret_file.chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"other users can read .*\(its mode is 0640\); chmod 600 it"):
        folder.pair()


def test_a_public_key_in_the_place_of_the_secret_one_is_refused(folder: KeyFolder) -> None:
    folder.new()
    folder.secret_file.write_bytes(folder.public_file.read_bytes())
    with pytest.raises(ConfigurationError, match="has no secret key; make a new pair with `fedemu keys new`"):
        folder.pair()


def test_without_keys_the_command_that_makes_them_is_named(folder: KeyFolder) -> None:
    with pytest.raises(ConfigurationError, match=r"there is no key in .*; make one with `fedemu keys new`"):
        folder.pair()


def test_machines_are_approved_and_revoked_by_name(folder: KeyFolder) -> None:
    folder.approve("lab2", KEY)
    assert folder.approved() == {"lab2": KEY}
    assert read_public(str(folder.approved_folder / "lab2.key")) == KEY
    with pytest.raises(ConfigurationError, match="this key is approved already, as lab2"):
        folder.approve("lab3", KEY)
    with pytest.raises(ConfigurationError, match=r"no machine 'lab3' is approved in .*; approved are: lab2"):
        folder.revoke("lab3")
    assert folder.revoke("lab2") == KEY
    assert folder.approved() == {}
    with pytest.raises(ConfigurationError, match=r"no machine 'lab2' is approved in .*; none is$"):
        folder.revoke("lab2")


@pytest.mark.parametrize("name", ["", "../lab", "a/b", ".hidden", "-x", "a b", "n" * 65])
def test_a_name_that_is_no_file_name_is_refused(folder: KeyFolder, name: str) -> None:
    with pytest.raises(ConfigurationError, match="is no name for a machine"):
        folder.approve(name, KEY)
    assert not folder.approved_folder.exists()


def test_a_damaged_file_approves_nobody_and_hinders_nobody(folder: KeyFolder) -> None:
    folder.approve("lab2", KEY)
    (folder.approved_folder / "lab3.key").write_text('curve\n    public-key = "cut"\n')
    (folder.approved_folder / "lab4.key").write_bytes(b"\xff\x00")
    (folder.approved_folder / "lab5.key").write_text("curve\n    public-key\n")
    assert folder.approved() == {"lab2": KEY}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("nofile", "'nofile' is neither a public key of 40 characters nor a file"),
        (".", r"'.' is a folder; give the file in it"),
        (__file__, "test_store.py has no public key"),
        ('"' * 40, "this is no key: it must be 40 characters of Z85"),
        ("#" * 40, "this is no key"),
        ("é" * 40, "this is no key"),
    ],
)
def test_what_is_no_key_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read_public(text)


def test_a_secret_key_is_not_taken_for_a_public_one(folder: KeyFolder) -> None:
    public = folder.new()
    assert read_public(str(folder.public_file)) == read_public(public) == public
    with pytest.raises(ConfigurationError, match="has a secret key, which stays on its machine; give the file machine"):
        read_public(str(folder.secret_file))
