"""The folder for sockets: who may enter it, where it is, and what becomes of it."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fedemu.protocol.addresses import check_address
from fedemu.protocol.errors import ConfigurationError
from fedemu.protocol.host import private
from fedemu.protocol.host.private import (
    PREFIX,
    leave_private,
    own_folder,
    private_folder,
    temporary_folder,
    working_folder,
)


@pytest.fixture
def place(socket_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first place in which folders are made. Its path is short, as those of sockets have to be."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_folder))
    return socket_folder


def test_only_this_user_can_enter_and_it_is_removed_at_the_end(place: Path) -> None:
    with private_folder() as folder:
        assert folder.parent == place
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "socket").touch()
    assert list(place.iterdir()) == []


def test_what_a_killed_process_has_left_is_removed_and_what_is_in_use_or_somebody_elses_stays(
    place: Path, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], set[str]]
) -> None:
    script = (
        "import os; from fedemu.protocol.host.private import private_folder\n"
        "with private_folder(): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], check=False, env=os.environ | {"XDG_RUNTIME_DIR": str(place)})
    (left,) = place.glob(PREFIX + "*")
    link, before = place / f"{PREFIX}link", descriptors()
    link.symlink_to(place)
    with monkeypatch.context() as somebody_else:
        somebody_else.setattr(os, "getuid", lambda: 12345)
        with private_folder():
            assert left.exists()
    with private_folder() as first, private_folder() as second:
        assert not left.exists()
        assert {first, second, link} == set(place.iterdir())
    assert not descriptors() - before


def test_a_working_folder_goes_with_its_process_or_with_the_next_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    script = (
        "import os; from fedemu.protocol.host.private import working_folder\n"
        "with working_folder('work-'): os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script], check=False, env=os.environ | {"TMPDIR": str(place)})
    (left,) = place.glob("work-*")
    with working_folder("work-") as first, working_folder("work-") as second:
        assert not left.exists()
        assert first.stat().st_mode & 0o777 == 0o700
        assert {first, second} == set(place.iterdir())
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("make", [temporary_folder, lambda: private_folder().__enter__()], ids=["itself", "sockets"])
def test_where_no_folder_for_temporary_files_can_be_written_the_first_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], object]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    monkeypatch.setenv("TMPDIR", "/nowhere")
    with pytest.raises(ConfigurationError) as refused:
        make()
    assert str(refused.value) == (
        "/nowhere cannot be written: No such file or directory; set TMPDIR to a folder for temporary files"
    )


@pytest.mark.parametrize("moment", ["opened", "locked"])
@pytest.mark.parametrize("make", [private_folder, lambda: working_folder("test-")], ids=["private", "working"])
def test_a_new_folder_that_another_process_takes_for_a_leftover_is_made_again(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    descriptors: Callable[[], set[str]],
    make: Callable[[], AbstractContextManager[Path]],
    moment: str,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    mkdtemp, flock, made = tempfile.mkdtemp, fcntl.flock, []

    def make_and_lose(prefix: str, dir: Path) -> str:
        made.append(mkdtemp(prefix=prefix, dir=dir))
        if moment == "opened" and len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    def lock_late(descriptor: int, operation: int) -> None:
        if moment == "locked" and len(made) == 1:
            os.rmdir(made[0])
        flock(descriptor, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose)
    monkeypatch.setattr(fcntl, "flock", lock_late)
    before = descriptors()
    with make() as folder:
        assert [str(folder), folder.exists(), len(made)] == [made[1], True, 2]
        assert len(descriptors() - before) == 1
    assert not descriptors() - before


def test_a_place_that_takes_no_sockets_is_passed_over_and_left_clean(
    place: Path, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], set[str]]
) -> None:
    bind = private._try_socket

    def refuse(path: Path) -> None:
        if place in path.parents:
            raise OSError(errno.EOPNOTSUPP, "no sockets here")
        bind(path)

    monkeypatch.setattr(private, "_try_socket", refuse)
    before = descriptors()
    with private_folder() as folder:
        assert place not in folder.parents
        assert list(place.iterdir()) == []
        assert list(folder.iterdir()) == []
    assert not descriptors() - before


def test_a_place_with_a_long_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    far = tmp_path / ("long" * 25)
    far.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(far))
    with private_folder() as folder:
        assert folder.parent != far
        assert len(str(folder / "coordinator")) <= 107
    assert list(far.iterdir()) == []


@pytest.mark.parametrize("name", [b"two\nlines", b"\xff\xfe"])
def test_a_place_that_no_address_can_name_is_passed_over(
    name: bytes, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (odd := place / os.fsdecode(name)).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(odd))
    with private_folder() as folder:
        check_address(f"ipc://{folder}/coordinator", listening=True)
        assert list(odd.iterdir()) == []


def test_a_machine_without_a_place_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (far := tmp_path / ("long" * 25)).mkdir()
    monkeypatch.setattr(private, "_places", lambda: [tmp_path / "nowhere", far])
    said = (
        r"nowhere \(No such file or directory\) or in .*long \(its path is too long\); set XDG_RUNTIME_DIR to a folder"
    )
    with pytest.raises(ConfigurationError, match=said), private_folder():
        pass


def test_the_last_to_leave_removes_the_folder_of_a_maker_that_is_gone(tmp_path: Path) -> None:
    orphan = tmp_path / f"{PREFIX}x"
    orphan.mkdir()
    (orphan / "other").touch()
    leave_private(f"ipc://{orphan}/coordinator")
    assert orphan.exists()
    (orphan / "other").unlink()
    leave_private(f"ipc://{orphan}/coordinator")
    assert not orphan.exists()


def test_a_folder_of_ones_own_is_closed_to_others_and_never_somebody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine"
    assert own_folder(path).stat().st_mode & 0o777 == 0o700
    path.chmod(0o755)
    assert own_folder(path).stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigurationError, match="link was made by somebody else; remove it, or set TMPDIR"):
        own_folder(tmp_path / "link")
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(ConfigurationError, match="mine was made by somebody else"):
        own_folder(path)


def test_a_working_folder_that_cannot_be_locked_is_not_left_behind(
    place: Path, monkeypatch: pytest.MonkeyPatch, descriptors: Callable[[], set[str]]
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = descriptors()
    with pytest.raises(OSError, match="No locks available"), working_folder("test-", place):
        pass
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    with pytest.raises(ConfigurationError) as refused, working_folder("test-"):
        pass
    assert str(refused.value) == (
        f"{place} cannot be written: No locks available; set TMPDIR to a folder for temporary files"
    )
    assert list(place.iterdir()) == []
    assert not descriptors() - before
