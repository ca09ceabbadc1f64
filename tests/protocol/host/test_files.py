"""Files that are written whole, or piece by piece."""

import errno
import fcntl
import os
import stat
from functools import partial
from pathlib import Path

import pytest

from fedemu.protocol.errors import ConfigurationError, FedemuError
from fedemu.protocol.host.files import (
    PARTIAL,
    PartialFile,
    remove_abandoned,
    shortage,
    usable,
    whole_name,
    write_among_others,
    write_for_people,
    write_whole,
)


@pytest.mark.parametrize(
    "write", [write_whole, partial(write_whole, durable=True), write_among_others, write_for_people]
)
def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path, descriptors, write):
    path, before = tmp_path / "a.json", descriptors()
    for content in (b"first, longer", "zwölf".encode()):
        write(path, content)
    assert path.read_bytes() == "zwölf".encode()
    assert os.listdir(tmp_path) == ["a.json"]
    assert not descriptors() - before


def test_a_file_system_need_not_know_of_modes_nor_of_waiting_for_the_names_in_a_folder(tmp_path: Path, monkeypatch):
    fsync, folders = os.fsync, []

    def sync_files_only(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            folders.append(descriptor)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    def refuse(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fsync", sync_files_only)
    monkeypatch.setattr(os, "fchmod", refuse)
    write_whole(tmp_path / "a.json", b"new", durable=True)
    write_among_others(tmp_path / "b.json", b"new")
    assert folders
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]


@pytest.mark.parametrize("write", [write_whole, write_among_others, write_for_people])
def test_a_disk_that_takes_only_a_part_of_a_file_gets_back_its_room(tmp_path: Path, write, files_end_at):
    path = tmp_path / "a.json"
    write(path, b"old")
    with files_end_at(100), pytest.raises(FedemuError, match=r"a\.json cannot be written"):
        write(path, bytes(1000))
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("write", [write_among_others, write_for_people])
def test_of_two_that_write_a_file_at_the_same_time_the_last_wins_whole(tmp_path: Path, monkeypatch, write):
    path, replace = tmp_path / "report.html", os.replace

    def beside_another(source, target):
        monkeypatch.setattr(os, "replace", replace)
        write(path, b"the first to end")
        assert path.read_bytes() == b"the first to end"
        replace(source, target)

    monkeypatch.setattr(os, "replace", beside_another)
    write(path, b"the last")
    assert path.read_bytes() == b"the last"
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_file_for_people_has_the_mode_of_any_file_and_what_killed_writers_of_it_left_is_removed(tmp_path: Path):
    names = ["[a].html.0123abcd.partial", "a.html.0123abcd.partial", "[a].html.partial", "[a].html.0123.partial"]
    for name in names:
        (tmp_path / name).touch()
    before = os.umask(0o027)
    try:
        write_for_people(tmp_path / "[a].html", "zwölf")
    finally:
        os.umask(before)
    assert (tmp_path / "[a].html").read_text(encoding="utf-8") == "zwölf"
    assert stat.S_IMODE((tmp_path / "[a].html").stat().st_mode) == 0o640
    assert set(os.listdir(tmp_path)) == {"[a].html", *names[1:]}
    assert [whole_name(name) for name in names] == ["[a].html", "a.html", "[a].html", "[a].html.0123"]


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "a.json"
    write_whole(path, b"old")

    def full(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(FedemuError, match=r"a\.json cannot be written: the disk is full; make room there$"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.ENOSPC, 5, "the disk is full; make room there, or name another"),
        (errno.EDQUOT, 5, "the disk is full; make room there, or name another"),
        (errno.EFBIG, 5, "File too large; name another"),
        (errno.EIO, 5, "Input/output error; name another"),
        (errno.EACCES, 2, "Permission denied; name another"),
        (errno.ENOTDIR, 2, "Not a directory; name another"),
        (errno.EMFILE, 2, "the limit of open files is reached; raise it (ulimit -n)"),
        (errno.ENOMEM, 2, "no memory is left; free some"),
    ],
)
def test_a_name_that_cannot_be_written_is_the_users_mistake_and_a_disk_that_fails_is_not(
    tmp_path: Path, monkeypatch, number: int, code: int, said: str
) -> None:
    path = tmp_path / "a.json"

    def refuse(*_) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", refuse)
    for write in (refuse, lambda: write_whole(path, b"new")):
        with pytest.raises(FedemuError) as told, usable(path, "name another"):
            write()
        assert str(told.value) == f"{path} cannot be written: {said}"
        assert (told.value.exit_code, isinstance(told.value, ConfigurationError)) == (code, code == 2)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FedemuError("a sentence"), None),
        (ConfigurationError("a sentence"), None),
        (ConfigurationError("a sentence with a remedy"), OSError(errno.EACCES, "Permission denied")),
    ],
)
def test_what_is_no_refusal_of_the_system_or_has_its_remedy_is_told_as_it_is(
    tmp_path: Path, error: FedemuError, cause: OSError | None
) -> None:
    with pytest.raises(FedemuError) as told, usable(tmp_path, "name another"):
        raise error from cause
    assert told.value is error


def test_several_writers_of_one_file_do_not_meet_and_nobody_takes_a_partial_file_that_is_written(tmp_path, monkeypatch):
    path, replace = tmp_path / "own", os.replace

    def meanwhile(source, target):
        monkeypatch.setattr(os, "replace", replace)
        write_among_others(path, b"the other one's")
        remove_abandoned(tmp_path)
        replace(source, target)

    monkeypatch.setattr(os, "replace", meanwhile)
    write_among_others(path, b"this one's")
    assert path.read_bytes() == b"this one's"
    assert os.listdir(tmp_path) == ["own"]


def test_pieces_in_any_order_become_a_read_only_file_when_it_is_put_in_place(tmp_path: Path):
    path = tmp_path / "blob"
    with PartialFile(path) as file:
        file.write(b"world", 6)
        file.write(b"hello ", 0)
        assert not path.exists()
        assert file.read(4, 100) == b"o world"
        file.put_in_place()
    assert path.read_bytes() == b"hello world"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert os.listdir(tmp_path) == ["blob"]


def test_a_partial_file_that_is_not_put_in_place_is_removed(tmp_path: Path):
    with PartialFile(tmp_path / "blob") as file:
        file.write(b"half", 0)
    assert os.listdir(tmp_path) == []


def test_a_file_is_written_also_where_there_are_no_locks(tmp_path: Path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with PartialFile(tmp_path / "blob") as file:
        file.write(b"data", 0)
        remove_abandoned(tmp_path)
        file.put_in_place()
    assert (tmp_path / "blob").read_bytes() == b"data"


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_only_partial_files_that_nobody_has_open_are_abandoned(tmp_path: Path):
    (tmp_path / "whole").write_bytes(b"kept")
    PartialFile(tmp_path / "lost").write(b"half", 0)  # nobody has it open any more, as after a kill
    (tmp_path / f"lost{PARTIAL}").write_bytes(b"of another writer that was killed")
    assert len(os.listdir(tmp_path)) == 3
    with PartialFile(tmp_path / "blob") as file:
        remove_abandoned(tmp_path)
        file.put_in_place()
    assert sorted(os.listdir(tmp_path)) == ["blob", "whole"]


def test_a_file_that_another_process_removed_as_a_leftover_is_made_again(tmp_path: Path, monkeypatch):
    flock, removed = fcntl.flock, []

    def late(descriptor, operation):
        if not removed:
            removed.extend(tmp_path.iterdir())
            removed[0].unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with PartialFile(tmp_path / "blob") as file:
        file.write(b"data", 0)
        file.put_in_place()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"data"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "no memory is left; free some"),
        (
            OSError(errno.ENFILE, "Too many open files in system"),
            "the limit of open files is reached; raise it (ulimit -n)",
        ),
        (
            RuntimeError("can't start new thread"),
            "the limit of processes is reached; raise it (ulimit -u, or pids.max of the container)",
        ),
        (RuntimeError("another one"), ""),
        (OSError(errno.EACCES, "Permission denied"), ""),
    ],
)
def test_what_a_machine_lacks_is_told_in_words(error: Exception, words: str) -> None:
    assert shortage(error) == words


def test_a_private_file_is_for_this_user_alone_also_beside_what_a_killed_writer_left(tmp_path: Path):
    before = os.umask(0)
    try:
        path, left = tmp_path / "a.json", tmp_path / "a.json.partial"
        for file in (path, left):
            file.write_bytes(b"for everybody")
        write_whole(path, b"secret", private=True)
    finally:
        os.umask(before)
    assert (path.read_bytes(), path.stat().st_mode & 0o777, list(tmp_path.iterdir())) == (b"secret", 0o600, [path])
